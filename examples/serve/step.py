"""One step of the model over pages: the new tokens of all sequences, one after the other.

Pages of all layers are one array [L · P, page, K, H] for the keys and one for the values: layer l's
are those from l · P on, so that a scan over layers slices nothing, and everything is written in
place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch import serving

from ..smollm2.model import Config, Params, finish, logits_of, project, rotary_angles


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


@functools.partial(
    jax.jit, static_argnames=("config", "longest", "longest_cache"), donate_argnames="state"
)
def step(
    params: Params,
    state: State,
    tokens: jax.Array,
    cu_seqlens: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    config: Config,
    longest: int,
    longest_cache: int,
) -> tuple[jax.Array, State]:
    """The token that follows each slot's last one [B], and the state with the new ones in it.

    Args:
      tokens: [C]; those from cu_seqlens[b] to before cu_seqlens[b + 1] are slot b's.
      cu_seqlens: [B + 1].
      temperature: [B]; 0 takes the likeliest token.
      key: for the others.
      longest: the most new tokens of a slot.
      longest_cache: the most tokens that a slot has then; few different ones, for each is planned.
    """
    tables = serving.grow(state.tables, jnp.diff(cu_seqlens))
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    slots = cu_seqlens.shape[0] - 1
    slot = jnp.clip(jnp.searchsorted(cu_seqlens, place, side="right") - 1, 0, slots - 1)
    positions = tables.lengths[slot] - (cu_seqlens[slot + 1] - place)
    rotary = rotary_angles(positions[None], config)
    num_pages = tables.references.shape[0]

    def layer(carry: tuple[jax.Array, ...], scanned: tuple[Params, jax.Array]):
        x, key_pages, value_pages = carry
        weights, number = scanned
        table = jnp.where(tables.table < 0, -1, tables.table + number * num_pages)
        own = dataclasses.replace(tables, table=table)
        query, key, value = project(x, weights, rotary, config)  # [1, C, N or K, H]
        key_pages = serving.write(key_pages, key[0], own, cu_seqlens=cu_seqlens)
        value_pages = serving.write(value_pages, value[0], own, cu_seqlens=cu_seqlens)
        attended = attn_dispatch.paged_attention(
            query[0], key_pages, value_pages, table, tables.lengths,
            cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest_cache,
        )  # fmt: skip
        return (finish(x, attended[None], weights, config), key_pages, value_pages), None

    carry = (params["embed"][tokens][None], state.key_pages, state.value_pages)
    layers = (params["layers"], jnp.arange(config.layers, dtype=jnp.int32))
    (x, key_pages, value_pages), _ = jax.lax.scan(layer, carry, layers)
    last = x[:, jnp.clip(cu_seqlens[1:] - 1, 0, tokens.shape[0] - 1)]
    logits = logits_of(last, params, config)[0]
    noise = jax.random.gumbel(key, logits.shape) * temperature[:, None]
    following = (logits + noise).argmax(-1).astype(jnp.int32)
    return following, State(tables, key_pages, value_pages)
