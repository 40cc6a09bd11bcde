"""What share of all pairs a mask_mod leaves, and what share a kernel computes for them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.mask_as_lengths import MaskModAsLengths
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.tracing import Mod
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.semantics.row_ids import is_packed

TILE = 128
_MOST_PAIRS = 2**27
"""Of more of them, tiles at even distances stand for all."""


@dataclass(frozen=True)
class MaskShare:
    """Shares of a call's pairs of queries and keys, from 0 to 1."""

    pairs: float
    """Those that may attend: by mask_mod, causality and window."""
    tiles: float
    """Those in tiles of 128 x 128 that have such a pair."""
    computed: float
    """Those in tiles that a kernel computes: it leaves out what it was told of as causality, a
    window or lengths."""

    def __str__(self) -> str:
        pairs, tiles, computed = (
            f"{100 * x:.3g} %" for x in (self.pairs, self.tiles, self.computed)
        )
        return (
            f"{pairs} of the pairs attend; {tiles} are in tiles of {TILE} x {TILE} that have one, "
            f"{computed} in those that a kernel computes"
        )


def mask_share(spec: AttentionSpec, mod: Mod) -> MaskShare | None:
    """The shares; None where the pairs depend on more than lengths and positions.

    Args:
      spec: the call, its band as narrow as the mask_mod says.
      mod: its mask_mod, the arrays of which have values.
    """
    if is_packed(spec) or spec.symbols or spec.is_empty or spec.has("window"):
        return None
    lengths = spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths")
    if lengths and spec.options.causal_alignment == "bottom_right" and spec.band != (None, None):
        return None
    rows = _some(spec.seq_len_q, TILE, _MOST_PAIRS // spec.seq_len_kv)
    heads = _some(spec.num_heads, 1, _MOST_PAIRS // (len(rows) * TILE * spec.seq_len_kv))
    batch = _some(spec.batch, 1, _MOST_PAIRS // (len(heads) * len(rows) * TILE * spec.seq_len_kv))

    def of_row(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        t, s = first + jnp.arange(TILE)[None], jnp.arange(spec.seq_len_kv)[None]
        copies = jnp.zeros(len(batch), jnp.int32)
        indices = PairIndices(copies, jnp.asarray(batch)[:, None], jnp.asarray(heads)[None], t, s)
        arrays = [x[None] for x in mod.arrays]
        may = mods.may_attend(mod.program, indices, arrays)
        may = may & (t < spec.seq_len_q)[..., None] & _in_band(spec, t[0][:, None], s)
        tiles = jnp.pad(may, [(0, 0)] * 3 + [(0, -spec.seq_len_kv % TILE)])
        tiles = tiles.reshape(*may.shape[:2], TILE, -1, TILE).any((2, 4))
        return may.mean((0, 1)).sum(), tiles.mean((0, 1)).sum()

    counts = jax.jit(lambda: jax.lax.map(of_row, jnp.asarray(rows)))()
    pairs, tiles = (float(np.asarray(x).mean()) for x in counts)
    rows_of_tiles, keys_of_tiles = -(-spec.seq_len_q // TILE), -(-spec.seq_len_kv // TILE)
    return MaskShare(
        pairs * rows_of_tiles / (spec.seq_len_q * spec.seq_len_kv),
        tiles / keys_of_tiles,
        _computed(spec, mod, batch),
    )


def _some(count: int, step: int, most: int) -> np.ndarray:
    """Multiples of `step` below `count`; at even distances no more than `most` / `step`, or one."""
    every = np.arange(0, count, step, dtype=np.int32)
    wanted = min(max(most // step, 1), len(every))
    return every[np.arange(wanted) * len(every) // wanted]


def _in_band(spec: AttentionSpec, t: jax.Array, s: jax.Array) -> jax.Array:
    left, right = spec.band
    distance = s - t - _offset(spec)
    is_near = True if left is None else distance >= -left
    return jnp.asarray(is_near & (True if right is None else distance <= right))


def _offset(spec: AttentionSpec) -> int:
    is_bottom_right = spec.options.causal_alignment == "bottom_right"
    return spec.seq_len_kv - spec.seq_len_q if is_bottom_right else 0


def _computed(spec: AttentionSpec, mod: Mod, batch: np.ndarray) -> float:
    """The share of tiles that band and lengths leave."""
    t, s = (np.arange(0, x, TILE) for x in (spec.seq_len_q, spec.seq_len_kv))
    left, right = spec.band
    first = t[:, None] + _offset(spec)
    last = np.minimum(t + TILE, spec.seq_len_q)[:, None] - 1 + _offset(spec)
    is_left = np.ones((len(t), len(s)), bool)
    if left is not None:
        is_left &= np.minimum(s + TILE, spec.seq_len_kv) - 1 >= first - left
    if right is not None:
        is_left &= s <= last + right
    if MaskModAsLengths().inner(spec) is None:
        return float(is_left.mean())
    end = key_range(mod.program).row_end
    assert end is not None
    keys = [np.asarray(end.compute(jnp.int32(b), *(jnp.int32(0),) * 3, *mod.arrays)) for b in batch]
    return float(np.mean([(is_left & (s < x)).mean() for x in keys]))
