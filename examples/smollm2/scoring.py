"""How well the model predicts real text, and how far apart two ways of computing it are."""

import dataclasses
import functools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.implementation import ImplementationName

from .model import Config, InputError, Params, forward


@dataclasses.dataclass(frozen=True)
class Difference:
    """The differences of two sets of logits for the same text."""

    largest: float  # over all positions and tokens
    mean: float
    same_choice: float  # the share of positions where the likeliest token is the same


def sample_text() -> str:
    """English text that comes with every Python: the topics of its reference manual."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def split_windows(ids: list[int], count: int, length: int) -> np.ndarray:
    """`count` windows of `ids`, [count, length + 1]; each begins with the last token of the one
    before."""
    if len(ids) <= count * length:
        raise InputError(
            f"The sample text has {len(ids)} tokens, too few for {count} windows of {length}; "
            f"ask for {(len(ids) - 1) // length} windows or fewer."
        )
    return np.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)]).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def window_loss(
    params: Params,
    window: jax.Array,
    config: Config,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """The summed -log probability of tokens 1 to T of `window` [T + 1], each from those before."""
    logits, _ = forward(params, window[None, :-1], config, implementation=implementation)
    log_probabilities = jax.nn.log_softmax(logits[0])
    return -jnp.take_along_axis(log_probabilities, window[1:, None], axis=-1).sum()


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def window_logits(
    params: Params,
    window: jax.Array,
    config: Config,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """The logits [T, V] for tokens 1 to T of `window` [T + 1]."""
    return forward(params, window[None, :-1], config, implementation=implementation)[0][0]


@jax.jit
def _compare(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    gap = jnp.abs(one - other)
    return gap.max(), gap.mean(), (one.argmax(-1) == other.argmax(-1)).mean()


def difference(one: jax.Array, other: jax.Array) -> Difference:
    """Compare two sets of logits [T, V]."""
    return Difference(*map(float, _compare(one, other)))
