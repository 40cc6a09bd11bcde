"""One step of the model over pages: a token or a draft of each slot, and a chunk of one prompt.

Pages of all layers are one array [L · P, page, K, H] for the keys and one for the values: layer l's
are those from l · P on, so that a scan over layers slices nothing, and everything is written in
place.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch import serving

from ..smollm2.model import Config, Params, finish, logits_of, project, rotary_angles
from .sampling import Sampling, choose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that steps change; donated to each."""

    tables: serving.PageTables
    key_pages: jax.Array
    value_pages: jax.Array

    @staticmethod
    def new(config: Config, slots: int, num_pages: int, page_size: int, dtype: str) -> "State":
        """Slots that are empty, each with room for as many tokens as the model knows."""
        shape = (config.layers * num_pages, page_size, config.kv_heads, config.head_dim)
        per_slot = -(-config.context // page_size)
        return State(
            serving.new_tables(slots, min(per_slot, num_pages), num_pages, page_size),
            serving.new_pages(*shape, dtype),
            serving.new_pages(*shape, dtype),
        )


Numbers = Any
"""NumPy's arrays and scalars as the engine makes them, JAX's within a step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a step computes. D is 1, or with drafts one more than the most of them."""

    tokens: Numbers
    """int32 [B, D]: each slot's last token, and a draft of those after it."""
    number: Numbers
    """int32 [B]: how many of them there are; 0 for a slot that is not being answered."""
    chunk: Numbers
    """int32 [C]: tokens of a prompt; C may be 0."""
    chunk_slot: Numbers
    """int32 []: whose."""
    chunk_length: Numbers
    """int32 []: how many."""
    ended: Numbers
    """bool [B]: slots whose sequences end before this step."""


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the new tokens of a step stand, and how attention gets at them."""

    tables: serving.PageTables
    work: Work
    longest_cache: int

    @property
    def chunk_ends(self) -> jax.Array:
        """cu_seqlens [B + 1] of the chunk."""
        slots = jnp.arange(self.work.number.shape[0] + 1)
        return jnp.where(slots > self.work.chunk_slot, self.work.chunk_length, 0)

    def positions(self) -> jax.Array:
        """int32 [1, B · D + C]."""
        w, lengths = self.work, self.tables.lengths
        drafts = (lengths - w.number)[:, None] + jnp.arange(w.tokens.shape[1])
        chunk = lengths[w.chunk_slot] - w.chunk_length + jnp.arange(w.chunk.shape[0])
        return jnp.concatenate([drafts.ravel(), chunk])[None]

    def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[1, B · D + C, ...] as [B, D, ...] and [C, ...]."""
        number = self.work.tokens.size
        return x[0, :number].reshape(*self.work.tokens.shape, *x.shape[2:]), x[0, number:]

    def write(self, pages: jax.Array, new: jax.Array, tables: serving.PageTables) -> jax.Array:
        drafts, chunk = self.split(new)
        pages = serving.write(pages, drafts, tables, self.work.number)
        if chunk.shape[0]:
            pages = serving.write(pages, chunk, tables, cu_seqlens=self.chunk_ends)
        return pages

    def attend(
        self, query: jax.Array, pages: tuple[jax.Array, jax.Array], table: jax.Array
    ) -> jax.Array:
        """[1, B · D + C, N, H]; decoding and the chunk are calls of their own, of few shapes."""
        w, lengths = self.work, self.tables.lengths
        drafts, chunk = self.split(query)
        call = functools.partial(
            attn_dispatch.paged_attention, max_seqlen_kv=self.longest_cache
        )  # fmt: skip
        # Slots that have nothing to ask are empty: so their keys are not read.
        asking = jnp.where(w.number > 0, lengths, 0)
        several = {"query_seq_lengths": w.number} if w.tokens.shape[1] > 1 else {}
        out = call(drafts, *pages, table, asking, **several).reshape(-1, *query.shape[2:])
        if chunk.shape[0]:
            row, length = table[w.chunk_slot][None], lengths[w.chunk_slot][None]
            of_chunk = call(
                chunk[None], *pages, row, length, query_seq_lengths=w.chunk_length[None]
            )
            out = jnp.concatenate([out, of_chunk[0]])
        return out[None]


def advance(
    params: Params, state: State, work: Work, config: Config, longest_cache: int
) -> tuple[jax.Array, State]:
    """float32 logits [B, D, V] after each of a slot's tokens, and the state with all of them in it.

    Of a slot whose prompt this step reads, those after the chunk are in the first column.

    Args:
      longest_cache: the most tokens that a slot has then; few different ones, for each is planned.
    """
    slots = jnp.arange(work.number.shape[0], dtype=jnp.int32)
    of_chunks = jnp.where(slots == work.chunk_slot, work.chunk_length, 0)
    tables = serving.free(state.tables, work.ended)
    tables = serving.grow(tables, work.number + of_chunks)
    places = _Places(tables, work, longest_cache)
    rotary = rotary_angles(places.positions(), config)
    num_pages = tables.references.shape[0]

    def layer(carry: tuple[jax.Array, ...], scanned: tuple[Params, jax.Array]):
        x, key_pages, value_pages = carry
        weights, number = scanned
        table = jnp.where(tables.table < 0, -1, tables.table + number * num_pages)
        own = dataclasses.replace(tables, table=table)
        query, key, value = project(x, weights, rotary, config)  # [1, B · D + C, N or K, H]
        key_pages = places.write(key_pages, key, own)
        value_pages = places.write(value_pages, value, own)
        attended = places.attend(query, (key_pages, value_pages), table)
        return (finish(x, attended, weights, config), key_pages, value_pages), None

    tokens = jnp.concatenate([work.tokens.ravel(), work.chunk])
    carry = (params["embed"][tokens][None], state.key_pages, state.value_pages)
    layers = (params["layers"], jnp.arange(config.layers, dtype=jnp.int32))
    (x, key_pages, value_pages), _ = jax.lax.scan(layer, carry, layers)
    x, of_chunk = places.split(x)
    if work.chunk.shape[0]:
        last = of_chunk[jnp.maximum(work.chunk_length - 1, 0)]
        x = x.at[:, 0].set(jnp.where(of_chunks[:, None] > 0, last, x[:, 0]))
    return logits_of(x, params, config), State(tables, key_pages, value_pages)


@functools.partial(jax.jit, static_argnames=("config", "longest_cache"), donate_argnames="state")
def step(
    params: Params,
    state: State,
    work: Work,
    sampling: Sampling,
    config: Config,
    longest_cache: int,
) -> tuple[jax.Array, jax.Array, State]:
    """What follows, and the state with what was accepted in it.

    Returns:
      int32 [B, D + 1]: the tokens after each of a slot's, where `advance` has their logits; and in
      the last column how many tokens of the draft were right. Those that were not are taken back.
      bool []: there were too few pages, and nothing was changed.
      The state.
    """
    logits, state = advance(params, state, work, config, longest_cache)
    tables, drafts = state.tables, jnp.maximum(work.number - 1, 0)
    first = jnp.maximum(tables.lengths - 1 - drafts, 0)[:, None]
    column = jnp.arange(work.tokens.shape[1], dtype=jnp.int32)[None]
    following = choose(logits, sampling, first + column)
    is_right = (following[:, :-1] == work.tokens[:, 1:]) & (column[:, :-1] < drafts[:, None])
    right = jnp.cumprod(is_right, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    tables = serving.shrink(tables, drafts - right)
    found = jnp.concatenate([following, right[:, None]], axis=1)
    return found, tables.failed, dataclasses.replace(state, tables=tables)
