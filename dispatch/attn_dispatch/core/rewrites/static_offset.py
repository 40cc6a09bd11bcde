"""A static offset of the diagonal, as one that starts in the bottom right of the pairs that attend.

Keys that no query sees are left out, and so are queries that see no key. The rest is a rectangle
whose corners lie in the band. So the band counted from either corner has no side below 0, and
kernels skip what it hides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from attn_dispatch.call.operands import Section
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    UNSEEN,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    without_band,
    without_offset,
)


@dataclass(frozen=True)
class _Rectangle:
    """The queries that see a key, and the keys that some query sees: first and end of each."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int
    """The key, counted from the first of them, that is level with the first of the queries."""

    @staticmethod
    def of(spec: AttentionSpec) -> _Rectangle:
        """The rectangle of a call with a static offset; it may be empty."""
        (left, right), offset = spec.band, spec.meaning.causal_offset
        first, end = 0, spec.seq_len_q
        if right is not None:
            first = max(first, -(offset + right))
        if left is not None:
            end = min(end, spec.seq_len_kv - offset + left)
        first_key, end_key = 0, spec.seq_len_kv
        if left is not None:
            first_key = max(first_key, first + offset - left)
        if right is not None:
            end_key = min(end_key, end + offset + right)
        return _Rectangle((first, end), (first_key, end_key), offset + first - first_key)

    @property
    def is_empty(self) -> bool:
        return self.queries[0] >= self.queries[1] or self.keys[0] >= self.keys[1]

    @property
    def from_the_end(self) -> int:
        """How far the diagonal is right of the one that starts in the bottom right."""
        (first, end), (first_key, end_key) = self.queries, self.keys
        return self.offset - ((end_key - first_key) - (end - first))

    @property
    def section(self) -> Section:
        """The part of the call's arrays that it covers."""
        return Section({"t": self.queries, "s": self.keys})


def _is_static(spec: AttentionSpec) -> bool:
    has_offset = spec.meaning.causal_alignment == "by_offset" and not spec.has("causal_offset")
    is_known = not (spec.has_runtime_lengths or spec.has("window") or spec.symbols)
    return has_offset and is_known and not spec.is_empty


def _when(spec: AttentionSpec) -> bool:
    if not _is_static(spec):
        return False
    found = _Rectangle.of(spec)
    if found.is_empty:
        return False
    # A mod counts from the first query and key of the whole call.
    if spec.meaning.mods and (found.queries[0] or found.keys[0]):
        return False
    return not spec.has("alibi_slopes") or 0 in (found.offset, found.from_the_end)


def _inner(spec: AttentionSpec) -> AttentionSpec:
    found = _Rectangle.of(spec)
    # ALiBi needs the corner in which the diagonal does start.
    is_top_left = spec.has("alibi_slopes") and found.from_the_end != 0
    moved = found.offset if is_top_left else found.from_the_end
    left, right = spec.band
    left, right = (
        None if left is None else left - moved,
        None if right is None else right + moved,
    )
    is_causal = right == 0
    meaning = replace(
        spec.meaning,
        causal_alignment="top_left" if is_top_left else "bottom_right",
        causal_offset=0,
        is_causal=is_causal,
        window=(left, None if is_causal else right),
    )
    return changed(spec, sizes=found.section.sizes, meaning=meaning)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    section = _Rectangle.of(spec).section
    given = {name: section.cut(name, x) for name, x in operands.items()}
    results = calls.kernel(for_(inner, given))
    return {
        name: section.pasted(name, results[name], whole.shape, UNSEEN.get(name, 0))
        for name, whole in zip(spec.result_names, spec.results, strict=True)
    }


STATIC_OFFSET = Rewrite(
    "offset: from the bottom right, without the rows that see nothing",
    _inner,
    _compute,
    when=_when,
    # Kernels draw the mask of a call of other lengths.
    moves_dropout=True,
    needed_for="rewrites/static_offset",
)


def _hides_all(spec: AttentionSpec) -> bool:
    return _is_static(spec) and _Rectangle.of(spec).is_empty


def _constants(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    return {
        name: jnp.full(x.shape, UNSEEN.get(name, 0), x.dtype)
        for name, x in zip(spec.result_names, spec.results, strict=True)
    }


NOTHING_SEEN = Rewrite(
    "offset: hides every pair: constants, and no kernel",
    # The same call without a band, so that any other reason against it is found.
    lambda spec: without_offset(changed(spec, meaning=without_band(spec.meaning))),
    _constants,
    is_constant=True,
    when=_hides_all,
    moves_dropout=True,
    needed_for="rewrites/offset_hides_all",
)
