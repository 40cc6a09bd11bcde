"""Calls whose masks are intervals: their static facts, and arrays drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import mods
from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.tracing import trace
from tests.support.option_parts import options_with

BATCH, HEADS = 2, 2
Arrays = dict[str, np.ndarray]
Draw = np.random.RandomState

GROUPS, PREFIX = np.zeros((BATCH, 12), np.int32), np.zeros(BATCH, np.int32)


def image_groups(b, n, t, s, groups):
    return (s <= t) | ((groups[b, s] == groups[b, t]) & (groups[b, t] > 0))


def window_and_sinks(b, n, t, s):
    return ((t - s < 3) | (s < 2)) & (s <= t)


def past_or_hole(b, n, t, s, lengths):
    return jnp.where(t % 3 == 0, s < lengths[b], (s < t - 2) | (s > t))


def three_ranges(b, n, t, s, lengths):
    return (s < 2) | (jnp.abs(s - t) < 2) | (s >= lengths[b])


MODS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "window and sinks": (window_and_sinks, ()),
    "prefix": (lambda b, n, t, s, p: (s <= t) | (s < p[b]), (PREFIX,)),
    "chunks": (mods.chunked_window(4), ()),
    "image groups": (image_groups, (GROUPS,)),
    "documents": (lambda b, n, t, s, g: g[b, t] == g[b, s], (GROUPS,)),
    "dilated": (mods.dilated_window(6, 2), ()),
    "dilated prefix": (lambda b, n, t, s, p: (s % 2 == t % 2) & (s < p[b]), (PREFIX,)),
    "equal chunks": (lambda b, n, t, s: s // 4 == t // 4, ()),
    "past or hole": (past_or_hole, (PREFIX,)),
    "not the own key": (lambda b, n, t, s: t != s, ()),
    "three ranges": (three_ranges, (PREFIX,)),
    "no keys": (lambda b, n, t, s: (s < t) & (s > t), ()),
    "by query alone": (lambda b, n, t, s: t % 2 == 0, ()),
    "by group": (lambda b, n, t, s, g: g[b, s] == 2, (GROUPS,)),
    "product": (lambda b, n, t, s: t * s < 20, ()),
}


@dataclass(frozen=True)
class IntervalCall:
    """The static facts of a call."""

    layout: str
    """plain, lengths, segments, ids (segment ids without a largest one), same or cu."""
    t: int
    s: int
    facts: dict[str, Any] = field(default_factory=dict)
    mod: str = ""
    has_window_array: bool = False
    has_offset_array: bool = False

    def draw(self, rng: Draw) -> Arrays:
        """The arrays of the call, some of them invalid."""
        arrays: Arrays = {
            "query": np.zeros((BATCH, self.t, HEADS, 1), np.float32),
            "key": np.zeros((BATCH, self.s, 1, 1), np.float32),
            "value": np.zeros((BATCH, self.s, 1, 1), np.float32),
        }
        arrays |= _LAYOUTS[self.layout](rng, self.t, self.s)
        if self.has_window_array:
            arrays["window"] = rng.randint(-1 if rng.rand() < 0.2 else 0, 6, (BATCH, 2))
        if self.has_offset_array:
            arrays["causal_offset"] = rng.randint(-12, 13, rng.randint(1, BATCH + 1))
        if self.mod:
            made = [_filled(x, rng) for x in MODS[self.mod][1]]
            names = mod_operands("mask_mod", len(made))
            arrays |= {name: x[None] for name, x in zip(names, made, strict=True)}
            arrays["mods_start"] = np.zeros((1, 2))
        kept = ("query", "key", "value")
        return {x: y if x in kept else y.astype(np.int32) for x, y in arrays.items()}

    def spec(self, arrays: Arrays) -> AttentionSpec:
        options = options_with(tuple(arrays), scale=1.0, **self.facts)
        if self.mod:
            function, read = MODS[self.mod]
            program = trace("mask_mod", function, read, "float32").program
            options = options_with(tuple(arrays), scale=1.0, mask_mod=program, **self.facts)
        return AttentionSpec.of(list(arrays.values()), options)


def _filled(x: np.ndarray, rng: Draw) -> np.ndarray:
    """Numbers in the shape of x; rows of groups are runs, mostly."""
    if x.ndim == 1:
        return rng.randint(0, 9, x.shape)
    runs = np.sort(rng.randint(0, 4, x.shape), axis=1)
    runs = (runs + rng.randint(0, 4, (len(x), 1))) % 4
    return rng.randint(0, 3, x.shape) if rng.rand() < 0.2 else runs


def _ids(rng: Draw, length: int, *, is_ordered: bool) -> np.ndarray:
    ids = rng.randint(0, 5, (BATCH, length))
    if is_ordered or rng.rand() < 0.7:
        ids = np.sort(ids, axis=1)
        ids = np.where(ids == rng.randint(0, 5), 0, ids)
    return ids


def _segments(rng: Draw, t: int, s: int) -> Arrays:
    is_ordered = rng.rand() < 0.8
    sides = {"query_segment_ids": t, "key_value_segment_ids": s}
    return {name: _ids(rng, length, is_ordered=is_ordered) for name, length in sides.items()}


def _same(rng: Draw, t: int, s: int) -> Arrays:
    ids = _ids(rng, t, is_ordered=True)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def _lengths(rng: Draw, t: int, s: int) -> Arrays:
    past = int(rng.rand() < 0.2)  # an invalid length
    return {
        "query_seq_lengths": rng.randint(0, t + 1, BATCH),
        "key_value_seq_lengths": rng.randint(0, s + 1, BATCH) + past,
    }


def _cu(rng: Draw, t: int, s: int) -> Arrays:
    def ends(length: int) -> np.ndarray:
        found = np.sort(rng.randint(0, length + 1, (BATCH, 4)), axis=1)
        found[:, 0] = 0
        return found

    return {"cu_seqlens_q": ends(t), "cu_seqlens_kv": ends(s)}


_LAYOUTS: dict[str, Callable[[Draw, int, int], Arrays]] = {
    "plain": lambda rng, t, s: {},
    "lengths": _lengths,
    "segments": _segments,
    "ids": _segments,
    "same": _same,
    "cu": _cu,
}


def drawn_calls(count: int, seed: int) -> list[IntervalCall]:
    """So many calls, of all layouts and mods in turn, with drawn facts."""
    rng, found = Draw(seed), list[IntervalCall]()
    layouts, names = list(_LAYOUTS), ["", *MODS]
    for i in range(count):
        layout = layouts[i % len(layouts)]
        t, s = [(12, 9), (9, 12)][rng.randint(2)]
        facts: dict[str, Any] = {
            "is_causal": bool(rng.rand() < 0.4),
            "causal_alignment": ("top_left", "bottom_right")[rng.randint(2)],
        }
        has_array = bool(rng.rand() < 0.2)
        if not has_array and rng.rand() < 0.6:
            sides = [None if rng.rand() < 0.3 else int(rng.randint(0, 6)) for _ in range(2)]
            facts["window"] = tuple(sides)
        if layout in ("segments", "same"):
            facts["max_segments"] = 4
            facts["max_seq_lens"] = (5, 5) if rng.rand() < 0.5 else None
        if layout == "cu" and rng.rand() < 0.5:
            facts["max_seq_lens"] = (8, 8)
        if layout == "same":
            s = t = 12
            facts["same_lengths"] = True
        if i % 4 == 3:
            facts |= {"causal_alignment": "by_offset", "causal_offset": int(rng.randint(-12, 13))}
        name = names[i // 2 % len(names)]
        has_offsets = i % 8 == 7
        if has_offsets:
            facts["causal_offset"] = 0
        found.append(IntervalCall(layout, t, s, facts, name, has_array, has_offsets))
    return found


def dense(rows: jax.Array | np.ndarray, keys: int) -> np.ndarray:
    """The pairs of rows of intervals as a kernel tests them, bool [..., T, S]."""
    places = np.arange(keys)
    a, length_a, b, length_b = (np.asarray(rows)[..., i : i + 1] for i in range(4))
    is_first = (places - a).astype(np.uint32) < length_a.astype(np.uint32)
    return is_first | ((places - b).astype(np.uint32) < length_b.astype(np.uint32))


def runs(mask: np.ndarray) -> np.ndarray:
    """The number of runs of True along the last axis."""
    before = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(1, 0)])[..., :-1]
    return (mask & ~before).sum(axis=-1)
