"""What a kernel has to compute for a call, and the traits of calls that change how fast it does.

Shapes and static arguments alone tell.

Kernels compute whole tiles. Which tiles they leave out depends on what they know of the mask:
causality, windows and sequences for all of them, the mask_mod for those that take lists of tiles.
What only arrays hold is taken to be the worst that is likely.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.numpy_values import may_attend
from attn_dispatch.programs.program import ModProgram, axes_of
from attn_dispatch.semantics.diagonal import static_offset

TILE = 128
"""Queries and keys of a tile, whatever tiles a kernel has."""

_UNEVEN = 1.25
"""The pairs of documents of random lengths over those of even ones."""

_DOCUMENTS = 4
"""Documents in a row of segment ids of which no number is given."""

_FILLED = 0.85
"""The share of keys that lengths leave."""

_SAMPLED_ROWS, _SAMPLED_TILES = 32, 512
"""Rows of tiles, and the tiles of each, at which a mask_mod is evaluated: evenly spaced ones."""

_MOST_BLOCKS = 4096
"""Blocks of queries that are counted one by one; of more, so many stand for all."""

_INSIDE = np.array((0, 43, 86, TILE - 1))
"""Places of a tile's rows and columns at which a mask_mod is evaluated."""


@dataclass(frozen=True)
class Work:
    """The tiles of one pass, and the bytes that it reads and writes."""

    tiles: float
    """Tiles that causality, windows and sequences leave, over all batch rows and heads."""
    listed: float
    """Tiles that the mask_mod leaves of these."""
    every: float
    """All tiles, those of other sequences included."""
    in_band: float
    """Tiles that causality and windows leave if the row is one sequence."""
    longest: float
    """Tiles of the longest row: of a block of queries or, backward, of keys."""
    longest_listed: float
    blocks: float
    """Blocks of queries, over all batch rows, heads and sequences, empty ones included."""
    megabytes: float
    """Arrays of rows and of keys, and their gradients."""
    scores: float
    """Millions of scores, of all pairs of queries and keys."""
    pair_megabytes: float
    """Arrays by pairs of queries and keys: a bias, a mask, and what a mask_mod allows, which counts
    for implementations that make an array of it."""
    assumed: str
    """What was assumed because only arrays tell; "" for nothing."""


@lru_cache(maxsize=4096)
def work_of(spec: AttentionSpec) -> Work:
    """The work of a call whose dims are all known."""
    sequences, queries, keys, assumed = _sequences(spec)
    # A kernel launches blocks for as many queries as each sequence may have.
    launched = spec.longest_sequences[0] if spec.is_packed and sequences > 1 else spec.seq_len_q
    counts = _tiles_in_band(spec, queries, keys)
    in_band = _tiles_in_band(spec, spec.seq_len_q, spec.seq_len_kv)
    heads = spec.batch * spec.num_heads
    uneven = _UNEVEN if spec.is_packed and sequences > 1 else 1.0
    filled = _FILLED if spec.has_lengths and not spec.is_paged and spec.seq_len_q > 1 else 1.0
    total = heads * sequences * float(counts.mean()) * _count(queries) * uneven * filled
    share = _mod_share(spec)
    every = heads * _count(spec.seq_len_q) * _count(spec.seq_len_kv)
    by_keys = spec.is_backward
    longest = float(_count(queries) if by_keys else counts.max(initial=0.0))
    if by_keys and _band(spec)[0] is not None:
        longest = min(longest, float(counts.max(initial=0.0)))
    return Work(
        tiles=total,
        listed=total * share,
        every=float(every),
        in_band=heads * float(in_band.mean()) * _count(spec.seq_len_q),
        longest=longest,
        longest_listed=max(longest * share, 1.0),
        blocks=float(heads * sequences * _count(launched)),
        megabytes=_megabytes(spec),
        scores=heads * spec.seq_len_q * spec.seq_len_kv / 1e6,
        pair_megabytes=_pair_megabytes(spec),
        assumed=assumed,
    )


def _sequences(spec: AttentionSpec) -> tuple[float, int, int, str]:
    """How many sequences a batch row has, the queries and keys of each, and what was assumed."""
    queries, keys = spec.seq_len_q, spec.seq_len_kv
    if spec.has_lengths and not spec.is_paged:
        return 1, queries, keys, f"{100 * _FILLED:.0f} % of the keys within the lengths"
    if not spec.is_packed:
        return 1, queries, keys, ""
    most, assumed = spec.most_sequences, "documents of similar lengths"
    if most is None:
        most, assumed = _DOCUMENTS, f"{_DOCUMENTS} documents in a row"
    most = max(min(most, queries), 1)
    longest = spec.longest_sequences
    of_each = -(-queries // most), -(-keys // most)
    queries, keys = (max(min(x), 1) for x in zip(of_each, longest, strict=True))
    return most, queries, keys, assumed


def _count(length: int) -> int:
    return -(-length // TILE)


def _tiles_in_band(spec: AttentionSpec, queries: int, keys: int) -> np.ndarray:
    """For each block of queries of a sequence, how many tiles of keys its band leaves.

    Of more than _MOST_BLOCKS blocks, some stand for all.
    """
    left, right = _band(spec)
    count = _count(queries)
    first = TILE * _places(count, _MOST_BLOCKS)
    last = np.minimum(first + TILE, queries) - 1
    offset = static_offset(spec)
    if offset is None:
        offset = keys - queries if spec.meaning.causal_alignment == "bottom_right" else 0
    begin = np.zeros(first.shape) if left is None else np.floor((first + offset - left) / TILE)
    end = np.full(first.shape, float(_count(keys)))
    if right is not None:
        end = np.minimum(end, np.floor((last + offset + right) / TILE) + 1)
    return np.maximum(end - np.maximum(begin, 0), 0)


def _band(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The call's band, cut to that of its mask_mod: implementations pass the narrower one on."""
    program = spec.meaning.mask_mod
    if program is None or spec.is_packed or static_offset(spec) != 0:
        return spec.band
    left, right = (
        min((x for x in sides if x is not None), default=None)
        for sides in zip(spec.band, key_range(program).band, strict=True)
    )
    return left, right


def _megabytes(spec: AttentionSpec) -> float:
    width = 2 if spec.dtype in ("bfloat16", "float16") else 4
    rows = spec.batch * spec.seq_len_q * spec.num_heads * (spec.head_dim + spec.head_dim_v)
    keys = spec.batch * spec.seq_len_kv * spec.num_kv_heads * (spec.head_dim + spec.head_dim_v)
    return (rows + keys) * width * (2 if spec.is_backward else 1) / 1e6


def _pair_megabytes(spec: AttentionSpec) -> float:
    pairs = spec.batch * spec.num_heads * spec.seq_len_q * spec.seq_len_kv / 1e6
    widths = {"bias": 2, "mask": 1}
    found = sum(pairs * width for name, width in widths.items() if spec.has(name))
    found += pairs if spec.meaning.mask_mod is not None else 0
    return found + (2 * pairs if "bias" in spec.wanted.gradients else 0)


@lru_cache(maxsize=1024)
def _share(
    program: ModProgram,
    queries: int,
    keys: int,
    band: tuple[int | None, int | None],
    rows: tuple[int, int],
) -> float:
    """The share of the band's tiles in which a mask_mod may attend, from a sample of them.

    `rows` are batch rows and heads.
    """
    tiles = _places(_count(queries), _SAMPLED_ROWS), _places(_count(keys), _SAMPLED_TILES)
    # Positions beyond int32 are the same to a mask: no array of them fits a device.
    t, s = (
        np.minimum((x[:, None] * TILE + _INSIDE).reshape(-1), 2**31 - 1).astype(np.int32)
        for x in tiles
    )
    distance = s[None].astype(np.int64) - t[:, None]
    left, right = band
    seen = (t[:, None] < queries) & (s[None] < keys)
    seen = seen & (True if left is None else distance >= -left)
    seen = seen & (True if right is None else distance <= right)

    def of_tiles(x: np.ndarray) -> np.ndarray:
        shape = len(tiles[0]), len(_INSIDE), len(tiles[1]), len(_INSIDE)
        return np.asarray(x.reshape(shape).any((1, 3)))

    axes = axes_of(program)
    places = (_ends(x) if axis in axes else [0] for axis, x in zip("bn", rows, strict=True))
    allowed = [
        of_tiles(may_attend(program, np.int32(b), np.int32(n), t[:, None], s[None]) & seen).sum()
        for b, n in itertools.product(*places)
    ]
    return float(np.mean(allowed) / max(of_tiles(seen).sum(), 1))


def _places(count: int, most: int) -> np.ndarray:
    """Numbers below `count`: all of them, or `most` in the middle of equal parts."""
    wanted = min(most, count)
    return (2 * np.arange(wanted) + 1) * count // (2 * wanted)


def _ends(count: int) -> list[int]:
    """The first two and the last two numbers below `count`, for masks by halves or by parity."""
    return sorted({x % count for x in (0, 1, -2, -1)})


def _mod_share(spec: AttentionSpec) -> float:
    program = spec.meaning.mask_mod
    if program is None or spec.is_packed:
        return 1.0
    rows = spec.batch, spec.num_heads
    return _share(program, spec.seq_len_q, spec.seq_len_kv, _band(spec), rows)


def _is_one_range(program: ModProgram | None) -> bool:
    """Whether a mask_mod leaves each query one range of keys, which needs no array of pairs."""
    return program is not None and not key_range(program).rest


_TRAITS: Mapping[str, Callable[[AttentionSpec], bool]] = {
    "causal": lambda x: x.band == (None, 0),
    "window": lambda x: x.band not in ((None, None), (None, 0)),
    "narrow window": lambda x: x.band[0] is not None and x.band[0] <= 512,
    "window in sequences": lambda x: x.is_packed and x.band not in ((None, None), (None, 0)),
    "wider keys, full": lambda x: x.band == (None, None) and x.head_dim != x.head_dim_v,
    "grouped heads": lambda x: x.num_heads > x.num_kv_heads,
    "float16": lambda x: x.dtype == "float16",
    "one query": lambda x: x.seq_len_q == 1,
    "few queries": lambda x: 1 < x.seq_len_q <= 16,
    "short rows": lambda x: 16 < x.seq_len_q <= 512,
    "other keys": lambda x: x.seq_len_q > 16 and x.seq_len_q != x.seq_len_kv,
    "short sequences": lambda x: x.is_packed and x.seq_len_q <= 256 * (x.most_sequences or 1),
    "lengths": lambda x: x.has_lengths and not x.is_paged,
    "segment ids": lambda x: x.has("query_segment_ids") and x.most_sequences is not None,
    "segment ids, any number": lambda x: x.has("query_segment_ids") and x.most_sequences is None,
    "cu_seqlens": lambda x: x.has("cu_seqlens_q"),
    "pages": lambda x: x.is_paged,
    "sinks": lambda x: x.has("sinks"),
    "soft cap": lambda x: x.meaning.logits_soft_cap is not None,
    "ALiBi": lambda x: x.has("alibi_slopes"),
    "bias": lambda x: x.has("bias"),
    "score_mod": lambda x: x.meaning.score_mod is not None,
    "mask_mod": lambda x: x.meaning.mask_mod is not None,
    "mask_mod of one range": lambda x: _is_one_range(x.meaning.mask_mod),
    "mask": lambda x: x.has("mask"),
    "several packed rows": lambda x: x.is_packed and x.batch > 1,
    "padded head dim": lambda x: x.head_dim not in (64, 96, 128, 192, 256, 512),
}

TRAITS = tuple(_TRAITS)


@lru_cache(maxsize=4096)
def traits_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The traits that a call has, in the order of TRAITS."""
    return tuple([name for name, has in _TRAITS.items() if has(spec)])


HEAD_DIMS = ("64", "96", "128", "192/128", "192", "256", "384", "512", "more")
"""Classes of head dims, each with what fits it."""


def head_dims_of(spec: AttentionSpec) -> str:
    """The class of a call's head dims: the narrowest that both fit."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if 128 < spec.head_dim <= 192 and spec.head_dim_v <= 128:
        return "192/128"
    limits = (64, 96, 128, 192, 256, 384, 512)
    return next((str(x) for x in limits if widest <= x), "more")
