"""Arrays of compiled FlashAttention-4's custom calls that are wrong in one fact."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.fa4_arrays import Array


def wrong_arrays(name: str, array: Array, batch: int, heads: int) -> Iterator[Array]:
    """The array with one fact changed, in every way that a kernel cannot stand."""
    yield array.changed(dtype="int32" if array.dtype != "int32" else "float32")
    yield array.changed(dtype="float64")
    size = array.described[3]
    for wrong in (size - 1, size + 1, 0, -size, 2 * size):
        yield array.changed(bytes=wrong)
    has_heads = "counts" in name or "indices" in name or name == "bits"
    is_read_by_number = has_heads or name in ("lse", "lse_grad", "lse_tangent", "sinks")
    yield array.changed(address=array.address + (2 if is_read_by_number else 8))
    yield array.changed(shape=array.shape[1:])
    yield array.changed(shape=(*array.shape, 1))
    yield array.changed(shape=())
    for axis, right in enumerate(array.shape):
        for extent in (right + 1, right - 1, 0, -1, -right, 2**31, 2**32 + right, 2**62, 2**63 - 1):
            if (has_heads or name in ("rows", "sinks")) and axis == 0 and extent in (1, batch):
                continue
            if has_heads and axis == 1 and extent in (1, heads):
                continue
            if "indices" in name and axis == 3 and 1 <= extent <= right:
                continue
            yield array.with_extent(axis, extent)
