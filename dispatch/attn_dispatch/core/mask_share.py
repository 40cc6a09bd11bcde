"""The share of all pairs that a mask_mod leaves, and the share that a kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.mask_as_lengths import MASK_MOD_AS_LENGTHS
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.program import axes_of
from attn_dispatch.programs.tracing import Mod
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.diagonal import static_offset
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.typed_jax import mapped

TILE = 128
_MOST_TILES = 2**13
_MOST_ROWS, _MOST_HEADS = 16, 8
"""With more tiles, batch rows or heads, a sample at even distances stands for all."""


@dataclass(frozen=True)
class MaskShare:
    """Shares of a call's pairs of queries and keys, from 0 to 1."""

    pairs: float
    """Pairs that may attend, by mask_mod, causality and window."""
    tiles: float
    """Pairs in tiles of 128 x 128 that contain such a pair."""
    computed: float
    """Pairs in tiles that causality, windows and lengths leave. Kernels that take no lists of tiles
    compute them all."""
    is_estimate: bool = False
    """Whether a sample of tiles stands for all."""

    def __str__(self) -> str:
        shares = (self.pairs, self.tiles, self.computed)
        pairs, tiles, computed = (f"{100 * x:.3g} %" for x in shares)
        about = "about " if self.is_estimate else ""
        return (
            f"{about}{pairs} of the pairs attend; {tiles} are in tiles of {TILE} x {TILE} that "
            f"have one, which kernels with lists of tiles compute; other kernels compute "
            f"{computed}, XLA all"
        )


def mask_share(spec: AttentionSpec, mod: Mod) -> MaskShare | None:
    """The shares; None where the pairs depend on more than positions.

    Args:
      spec: the call, with a band as narrow as the mask_mod allows.
      mod: its mask_mod, whose arrays have known values.
    """
    decides = ("query_seq_lengths", "key_value_seq_lengths", "window", "causal_offset")
    if spec.is_packed or spec.symbols or spec.is_empty or any(map(spec.has, decides)):
        return None
    axes = axes_of(mod.program)
    batch = _some(spec.batch if "b" in axes else 1, _MOST_ROWS)
    heads = _some(spec.num_heads if "n" in axes else 1, _MOST_HEADS)
    most = isqrt(_MOST_TILES // (len(batch) * len(heads)))
    rows, keys = (-(-length // TILE) for length in (spec.seq_len_q, spec.seq_len_kv))
    if rows < keys:
        first = _some(rows, most)
        others = _some(keys, _MOST_TILES // (len(batch) * len(heads) * len(first)))
    else:
        others = _some(keys, most)
        first = _some(rows, _MOST_TILES // (len(batch) * len(heads) * len(others)))
    height = min(TILE, spec.seq_len_q)
    s = (others[:, None] * TILE + np.arange(TILE, dtype=np.int32)).reshape(-1)

    def of_rows(start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        t = start * TILE + jnp.arange(height, dtype=jnp.int32)
        copies = jnp.zeros(len(batch), jnp.int32)
        b, n = jnp.asarray(batch)[:, None], jnp.asarray(heads)[None]
        indices = PairIndices(copies, b, n, t[None], jnp.asarray(s)[None])
        may = mods.may_attend(mod.program, indices, [x[None] for x in mod.arrays])
        is_there = (t < spec.seq_len_q)[:, None] & (s < spec.seq_len_kv)
        may = may & is_there & _in_band(spec, t[:, None], jnp.asarray(s))
        tiles = may.reshape(*may.shape[:3], len(others), TILE).any((2, 4))
        return may.mean((0, 1)).sum(), tiles.mean(), is_there.sum()

    with jax.ensure_compile_time_eval():
        found = mapped(of_rows, jnp.asarray(first))
        counts, tiles, there = (np.asarray(x, np.float64) for x in found)
        computed = _computed(spec, mod, batch)
    sampled = len(batch) * len(heads) * len(first) * len(others)
    everything = rows * keys
    everything *= (spec.batch if "b" in axes else 1) * (spec.num_heads if "n" in axes else 1)
    share, seen = counts.sum() / there.sum(), min(tiles.mean(), computed)
    return MaskShare(share, seen, computed, sampled < everything)


def _some(count: int, most: int) -> np.ndarray:
    """Numbers below `count`: all of them, or as many as `most`, in the middle of equal parts."""
    wanted = min(max(most, 1), count)
    return ((2 * np.arange(wanted, dtype=np.int64) + 1) * count // (2 * wanted)).astype(np.int32)


def _in_band(spec: AttentionSpec, t: jax.Array, s: jax.Array) -> jax.Array:
    left, right = spec.band
    distance = s - t - (static_offset(spec) or 0)
    is_near = True if left is None else distance >= -left
    return jnp.asarray(is_near & (True if right is None else distance <= right))


def _computed(spec: AttentionSpec, mod: Mod, batch: np.ndarray) -> float:
    """The share of tiles that band and lengths leave, over all rows of tiles."""
    t, keys = np.arange(0, spec.seq_len_q, TILE), spec.seq_len_kv
    (left, right), offset = spec.band, static_offset(spec) or 0
    begin, end = np.zeros_like(t), np.full_like(t, -(-keys // TILE))
    if left is not None:
        begin = np.clip((t + offset - left) // TILE, 0, end)
    if right is not None:
        last = np.minimum(t + TILE, spec.seq_len_q) - 1 + offset + right
        end = np.clip(last // TILE + 1, 0, end)
    ends = [end]
    if settings.current().rewrites and MASK_MOD_AS_LENGTHS.applied(spec) is not None:
        number = key_range(mod.program).row_end
        assert number is not None

        def of_batch_row(b: jax.Array) -> jax.Array:
            return number.compute(b, *(jnp.int32(0),) * 3, *mod.arrays)

        rows = jnp.broadcast_to(
            jax.vmap(of_batch_row)(jnp.asarray(batch)),
            batch.shape,
        )
        ends = [np.minimum(end, -(-np.clip(x, 0, keys) // TILE)) for x in np.asarray(rows)]
    share = np.mean([np.maximum(x - begin, 0).mean() for x in ends])
    return float(share / -(-keys // TILE))
