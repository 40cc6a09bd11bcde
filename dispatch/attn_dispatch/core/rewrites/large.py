"""The parts to try for a call that is larger than a kernel's launch grid or 32-bit strides allow.

A launch grid has at most 65,535 blocks along the axis that kernels use for batch rows or sequences.
Each implementation has rules for its limits. This module lists divisions that may help, the largest
parts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.in_parts import in_parts_of, length_of, most_heads
from attn_dispatch.core.rewrites.rewrite import Axis, Rewrite

MOST_BLOCKS = 65_535
"""The most blocks along one axis of a launch grid."""

LARGE = 2**30
"""The size of an array, or of a batch row of it, in elements, that some kernels cannot address."""

_LARGEST = 8 * LARGE
"""The size of the largest parts to try, in elements as `_elements_of_a_row` and
`_elements_of_splits` count them: no kernel runs larger parts."""

_KEYS_OF_A_SPLIT = 64
"""The fewest keys for which AITER's deterministic backward pass keeps one gradient of query."""


Steps = tuple[Rewrite, ...]
"""Rewrites into parts, each of which divides the parts of the one before."""


def parts_of_a_large_call(spec: AttentionSpec) -> Iterator[Steps]:
    """Divisions to try because a kernel may refuse the whole call; none for an ordinary call."""
    if spec.symbols or spec.is_empty:
        return
    sequences = (spec.most_sequences or 1) if spec.is_packed else 1
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
    """Divisions into ever smaller parts along the first axis, then along the next.

    The first parts are already small enough that some kernel may address their elements. Once the
    parts along an axis have size 1, they are divided along the next.
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
    """The size of a part, for the fewest and most equal parts of at most `most` rows or heads."""
    whole, most = length_of(spec, axis), max(most, 1)
    if axis == "heads":
        return most_heads(spec, most)
    return -(-whole // -(-whole // most))


def _elements_of_a_row(spec: AttentionSpec) -> int:
    """The number of elements in a batch row of the largest array.

    Gradients of key and value are counted with one entry for each query head.
    """
    t, s = spec.seq_len_q, spec.seq_len_kv
    widest = max(spec.head_dim, spec.head_dim_v)
    columns = s if spec.has("bias") or spec.has("mask") else 0
    return spec.num_heads * max(t * max(widest, columns), s * widest)


def _elements_of_splits(spec: AttentionSpec) -> int:
    """The number of elements of all gradients of query that AITER's deterministic backward pass
    keeps."""
    splits = -(-spec.seq_len_kv // _KEYS_OF_A_SPLIT)
    return splits * spec.batch * spec.seq_len_q * spec.num_heads * spec.head_dim
