"""A step of the model on pages, with the tokens of many sequences one after the other.

A step has the last token of each answer in progress, or that and a draft of several, and as many
tokens of prompts as there is room for. All tokens are rows of one batch, whose attention is one
call: each row has the page table of its sequence, and attends to the keys up to its token. Layers
are unrolled, each with separate pages, and share the page tables, so that what is computed from
those is computed once.

So the keys are read again for each token of a prompt. `cu_seqlens_q` would read them once for many
tokens, but with twice as many kernels: a step of 64 answers and 192 tokens of prompts takes 1.8 ms
this way, and 3.6 ms with `cu_seqlens_q` (H200, sequences of up to 1,216 tokens). If prompts are
much longer, measure both.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from attn_dispatch import serving

from ..smollm2.model import Config, Params, finish, logits_of, project, rotary_angles
from .sampling import Sampling, choose

LAST = -1
"""A placeholder for the token that was chosen last for a slot, which only the device knows."""

FAILED = -1
"""The number of accepted guesses in a step for which there were too few pages."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that a step changes. Its memory is reused for the next state (donated)."""

    tables: serving.PageTables
    last: jax.Array
    """int32 [B]: the token that was chosen last for each slot."""
    pools: tuple[jax.Array, ...]
    """The keys and values of each layer, [P, 2, page, K, H]."""

    @staticmethod
    def new(config: Config, slots: int, num_pages: int, page_size: int, dtype: str) -> "State":
        """A state of empty slots, each with room for the model's longest sequence."""
        shape = (num_pages, 2, page_size, config.kv_heads, config.head_dim)
        per_slot = -(-config.context // page_size)
        return State(
            serving.new_tables(slots, min(per_slot, num_pages), num_pages, page_size),
            jnp.zeros(slots, jnp.int32),
            tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)),
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """The tokens of a step: NumPy arrays in the engine, JAX arrays within the step."""

    number: Any
    """int32 [B]: the number of tokens of each slot in this step."""
    drafts: Any
    """int32 [B]: how many of these tokens, at the end, are guesses."""
    ended: Any
    """bool [B]: slots whose sequences end before this step."""
    tokens: Any
    """int32 [T]: the tokens of all slots, in the order of the slots, then padding."""

    def packed(self) -> Any:
        """The fields as one array, int32 [3 · B + T], which is sent faster than four arrays."""
        parts = (self.number, self.drafts, self.ended, self.tokens)
        where = jnp if isinstance(self.tokens, jax.Array) else np
        return where.concatenate(parts, dtype=np.int32)

    @staticmethod
    def unpacked(packed: jax.Array, slots: int) -> "Work":
        number, drafts, ended, tokens = jnp.split(packed, [slots, 2 * slots, 3 * slots])
        return Work(number, drafts, ended != 0, tokens)

    @property
    def ends(self) -> jax.Array:
        """int32 [B]: the index behind the last token of each slot."""
        return jnp.cumsum(self.number, dtype=jnp.int32)

    def last_rows(self, width: int) -> jax.Array:
        """int32 [B, D]: the rows of each slot from its last token that is not a guess."""
        rows = (self.ends - 1 - self.drafts)[:, None] + jnp.arange(width, dtype=jnp.int32)
        return jnp.clip(rows, 0, self.tokens.shape[0] - 1)


@functools.partial(
    jax.jit, static_argnames=("config", "longest_cache", "width"), donate_argnames="state"
)
def advance(
    params: Params,
    state: State,
    packed: jax.Array,
    config: Config,
    longest_cache: int,
    width: int = 1,
) -> tuple[jax.Array, State]:
    """float32 logits [B, D, V] after the last tokens of each slot, and the state with all tokens.

    The first logits of a slot follow its last token that is not a guess, the others its guesses.

    Args:
      params: weights with a dictionary for each layer (`by_layer`).
      packed: the `Work`, packed.
      longest_cache: the most tokens of a slot after the step. Use few values, because each is
        compiled.
      width: D, 1 or one more than the most guesses of a slot.
    """
    slots = state.last.shape[0]
    work = Work.unpacked(packed, slots)
    tables = serving.grow(serving.free(state.tables, work.ended), work.number)
    row, ends = jnp.arange(work.tokens.shape[0], dtype=jnp.int32), work.ends
    slot = jnp.minimum((ends <= row[:, None]).sum(axis=1), slots - 1)
    position = tables.lengths[slot] - (ends[slot] - row)
    # Rows past the last token attend to one key of any page. Without a key, the kernel would have
    # to write zeros.
    is_token = row < ends[-1]
    table = jnp.where(is_token[:, None], tables.table[slot], 0)
    keys = jnp.where(is_token, jnp.maximum(position + 1, 0), 1)
    cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])

    tokens = jnp.where(work.tokens == LAST, state.last[slot], work.tokens)
    x, rotary = params["embed"][tokens[:, None]], rotary_angles(position[:, None], config)
    pools = []
    for weights, pool in zip(params["layers"], state.pools, strict=True):
        query, key, value = project(x, weights, rotary, config)  # [T, 1, N or K, H]
        pool = serving.write(pool, (key[:, 0], value[:, 0]), tables, cu_seqlens=cu_seqlens)
        attended = attn_dispatch.paged_attention(
            query, pool, None, table, keys, max_seqlen_kv=longest_cache
        )
        x = finish(x, attended, weights, config)
        pools.append(pool)
    x = x[work.last_rows(width), 0]
    return logits_of(x, params, config), State(tables, state.last, tuple(pools))


@jax.jit
def follow(
    logits: jax.Array,
    tables: serving.PageTables,
    last: jax.Array,
    packed: jax.Array,
    sampling: Sampling | None,
) -> tuple[jax.Array, serving.PageTables, jax.Array]:
    """The next tokens, and the state with the accepted ones.

    Args:
      logits: those of `advance`, [B, D, V].
      sampling: None takes the likeliest tokens.

    Returns:
      int32 [B, D + 1]: for each slot, the tokens that the D logits give, and in the last column the
      number of guesses that were right, or FAILED; the tables without the wrong guesses; and the
      last token of each slot.
    """
    work, width = Work.unpacked(packed, last.shape[0]), logits.shape[1]
    first = jnp.maximum(tables.lengths - 1 - work.drafts, 0)[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    following = choose(logits, sampling, first + column)
    right = jnp.zeros_like(last)
    if width > 1:
        guesses = work.tokens[work.last_rows(width)[:, 1:]]
        is_right = (following[:, :-1] == guesses) & (column[:, :-1] < work.drafts[:, None])
        right = jnp.cumprod(is_right, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        tables = serving.shrink(tables, jnp.where(tables.failed, 0, work.drafts - right))
    chosen = jnp.take_along_axis(following, right[:, None], axis=1)[:, 0]
    last = jnp.where(tables.failed, last, chosen)
    right = jnp.where(tables.failed, FAILED, right)
    return jnp.concatenate([following, right[:, None]], axis=1), tables, last
