"""Chooses the next token: the likeliest, or one drawn from the likely ones."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each slot's tokens are chosen; all [B]."""

    temperature: jax.Array
    """float32; 0 takes the likeliest token."""
    top_k: jax.Array
    """int32: draw from this many of the likeliest tokens; 0 for all."""
    top_p: jax.Array
    """float32: draw from the fewest tokens whose probabilities add up to this; 1 for all."""
    seed: jax.Array
    """uint32: a token depends on this and its position only, not on other requests."""


def choose(logits: jax.Array, sampling: Sampling | None, positions: jax.Array) -> jax.Array:
    """The tokens int32 [B, D] after `positions` [B, D], chosen by float32 logits [B, D, V].

    Without `sampling` they are the likeliest. Sorting the vocabulary, which a draw needs, would
    take a large part of such a step.
    """
    if sampling is not None:
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)
        scaled = _likely(logits / temperature[:, None, None], sampling)
        noise = jax.vmap(jax.vmap(_noise, (None, 0, None)), (0, 0, None))(
            sampling.seed, positions, logits.shape[-1]
        )
        is_drawn = sampling.temperature[:, None, None] > 0
        logits = jnp.where(is_drawn, scaled + noise, logits)
    return logits.argmax(-1).astype(jnp.int32)


def _noise(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,))


def _likely(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits, with -inf for the tokens that top_k or top_p leave out."""
    ordered = -jnp.sort(-logits, axis=-1)
    size = logits.shape[-1]
    last = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size) - 1
    least = jnp.take_along_axis(ordered, last[:, None, None], axis=-1)
    share = jax.nn.softmax(jnp.where(ordered >= least, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    # The likeliest token is always kept, whatever its probability.
    is_kept = ((before < sampling.top_p[:, None, None]) | (before == 0)) & (ordered >= least)
    least = jnp.where(is_kept, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
