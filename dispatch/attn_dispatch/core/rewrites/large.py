"""Calls larger than kernels count: in the fewest parts that they do count.

A launch grid has at most 65,535 blocks along an axis, where kernels have batch rows or sequences,
and strides are counted in 32 bits. Each implementation has its own rules for that; here are the
parts that may help, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.in_parts import in_parts_of, length_of, most_heads
from attn_dispatch.core.rewrites.rewrite import Axis, Rewrite
from attn_dispatch.semantics.row_ids import is_packed, most_sequences

MOST_BLOCKS = 65_535
"""Blocks along one axis of a launch grid."""

LARGE = 2**30
"""Elements of an array, or of a batch row of it, from which some kernels may not count them."""

_LARGEST = 8 * LARGE
"""Elements, counted as below, of the largest parts that are tried: no kernel runs larger ones."""

_KEYS_OF_A_SPLIT = 64
"""AITER's deterministic backward pass keeps a gradient of query for so many keys, or more."""


Steps = tuple[Rewrite, ...]
"""Parts, each divided further as the next one says."""


def parts_of_a_large_call(spec: AttentionSpec) -> Iterator[Steps]:
    """Parts that kernels may run where they refuse the whole call; none of an ordinary call."""
    if spec.symbols or spec.is_empty:
        return
    sequences = (most_sequences(spec) or 1) if is_packed(spec) else 1
    blocks: tuple[tuple[Axis, int], ...] = (
        ("batch", MOST_BLOCKS // sequences),
        ("heads", MOST_BLOCKS),
    )
    for axis, most in blocks:
        if length_of(spec, axis) > max(most, 1):
            yield (in_parts_of(axis, _equal_size(spec, axis, most)),)
    if (elements := _elements_of_a_row(spec)) >= LARGE:
        yield from _halves(spec, ("heads",), elements)
    elif spec.meaning.deterministic_backward and (elements := _elements_of_splits(spec)) >= LARGE:
        yield from _halves(spec, ("batch", "heads"), elements)


def _halves(
    spec: AttentionSpec, axes: Sequence[Axis], elements: int, taken: Steps = ()
) -> Iterator[Steps]:
    """Ever smaller parts along one axis, and from those of size 1 along the next.

    The first have few enough elements that some kernel may count them.
    """
    if not axes:
        return
    axis, *others = axes
    size, inner = length_of(spec, axis), spec
    least_parts = max(2, elements // _LARGEST)
    while size > 1:
        size = _equal_size(spec, axis, min(size // 2, length_of(spec, axis) // least_parts))
        step = in_parts_of(axis, size)
        if (part := step.applied(spec)) is None:
            return
        inner = part
        yield (*taken, step)
        if size == 1:
            taken = (*taken, step)
    left = elements // max(length_of(spec, axis), 1)
    yield from _halves(inner, others, left, taken)


def _equal_size(spec: AttentionSpec, axis: Axis, most: int) -> int:
    """The size of the fewest parts that are as equal as they can be, of at most so many."""
    whole, most = length_of(spec, axis), max(most, 1)
    if axis == "heads":
        return most_heads(spec, most)
    return -(-whole // -(-whole // most))


def _elements_of_a_row(spec: AttentionSpec) -> int:
    """Elements of a batch row of the largest array, gradients for each query head included."""
    t, s = spec.seq_len_q, spec.seq_len_kv
    widest = max(spec.head_dim, spec.head_dim_v)
    columns = s if spec.has("bias") or spec.has("mask") else 0
    return spec.num_heads * max(t * max(widest, columns), s * widest)


def _elements_of_splits(spec: AttentionSpec) -> int:
    """Elements of the gradients of query that a deterministic backward pass keeps."""
    splits = -(-spec.seq_len_kv // _KEYS_OF_A_SPLIT)
    return splits * spec.batch * spec.seq_len_q * spec.num_heads * spec.head_dim
