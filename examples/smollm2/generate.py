"""Greedy text generation: one prefill, then one compiled step per token."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attn_dispatch.implementation import ImplementationName

from .model import Cache, Config, InputError, Params, decode_step, forward

# The cache's size is rounded up to a multiple of this, so that prompts of similar lengths share a
# compiled step.
CACHE_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Generated:
    """The tokens of an answer, without the one that ended it, and how fast they came."""

    ids: list[int]
    tokens_per_s: float  # of the decode steps alone, compilation excluded


@functools.partial(jax.jit, static_argnames=("config", "size", "implementation"))
def prefill(
    params: Params,
    prompt: jax.Array,
    config: Config,
    size: int,
    implementation: ImplementationName | None = None,
) -> tuple[jax.Array, Cache]:
    """The token [B] that follows the prompt [B, T], and the prompt's cache [L, B, size, K, H]."""
    logits, cache = forward(params, prompt, config, implementation=implementation)
    return logits[:, -1].argmax(-1), cache.padded_to(size)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def next_token(
    params: Params, cache: Cache, token: jax.Array, lengths: jax.Array, config: Config
) -> tuple[jax.Array, Cache]:
    """The token [B] that follows `token` [B] at position `lengths` [B], and the grown cache."""
    logits, cache = decode_step(params, cache, token, lengths, config)
    return logits.argmax(-1), cache


def generate(
    params: Params,
    config: Config,
    prompt: list[int],
    count: int,
    end_id: int,
    *,
    implementation: ImplementationName | None = None,
    on_token: Callable[[], object] = lambda: None,
) -> Generated:
    """Up to `count` tokens after `prompt`, always the likeliest one; stops at `end_id`."""
    if len(prompt) + count > config.context:
        raise InputError(
            f"{len(prompt)} prompt tokens and {count} new ones exceed the model's context of "
            f"{config.context}; shorten the prompt or ask for fewer tokens."
        )
    size = -(-(len(prompt) + count) // CACHE_BLOCK) * CACHE_BLOCK
    token, cache = prefill(params, jnp.array([prompt]), config, size, implementation)
    lengths = jnp.array([len(prompt)])
    # Compiled ahead of the loop, so that the loop's time is that of the steps alone.
    step = next_token.lower(params, cache, token, lengths, config).compile()

    ids: list[int] = []
    start = time.perf_counter()
    while (last := int(token[0])) != end_id:
        ids.append(last)
        on_token()
        if len(ids) == count:
            break
        token, cache = step(params, cache, token, lengths)
        lengths = lengths + 1
    steps = max(len(ids) - 1, 1)
    return Generated(ids, steps / (time.perf_counter() - start))
