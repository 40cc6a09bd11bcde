"""Features of cases, by which a wrong implementation says where its mistake can show."""

from __future__ import annotations

from itertools import chain
from typing import Any

from attn_dispatch_tools.verify.case import Case


def has_band(c: Case) -> bool:
    return c.is_causal or c.window != (None, None)


def is_packed(c: Case) -> bool:
    return c.q_segments is not None or c.cu_q is not None


def has_lengths(c: Case) -> bool:
    return c.q_lengths is not None or c.kv_lengths is not None


def is_plain(c: Case) -> bool:
    """True if every batch row is one sequence."""
    return not is_packed(c)


def returns_lse(c: Case) -> bool:
    return bool(c.lse_grad or c.needs_max or not (c.inference or c.dropout))


def pads_keys(c: Case) -> bool:
    lengths, rows = c.kv_lengths or (), c.kv_segments or ()
    return min(lengths, default=c.s) < c.s or 0 in chain(*rows) or _ends_early(c.cu_kv, c.s)


def pads_queries(c: Case) -> bool:
    lengths, rows = c.q_lengths or (), c.q_segments or ()
    return min(lengths, default=c.t) < c.t or 0 in chain(*rows) or _ends_early(c.cu_q, c.t)


def _ends_early(cu_seqlens: Any, length: int) -> bool:
    return cu_seqlens is not None and any(row[-1] < length for row in cu_seqlens)


def tile(length: int) -> int:
    """The number of rows or keys in a tile: few where the length is small, so that it has tiles."""
    return 64 if length > 64 else 4


def has_rest(length: int) -> bool:
    """True if there is more than one tile and the last is not whole."""
    return length > tile(length) and length % tile(length) != 0


def whole_tiles(length: int) -> int:
    """The number of rows or keys in whole tiles."""
    return length // tile(length) * tile(length)
