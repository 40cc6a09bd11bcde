"""Parts of the arrays that a program reads, until one element is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.scalar_code import ANY, Code, Register, Scalar, Span, span_of

_ONE = -1


@dataclass(frozen=True)
class View:
    """An array at fixed places along some of its axes, whole along the others."""

    array: int
    """The array's number."""
    extents: tuple[int, ...]
    """The array's shape."""
    kind: str
    """f, i or p; the name of another dtype, which kernels do not read."""
    span: Span
    """The least and largest of the array's integers."""
    places: tuple[Scalar | None, ...]
    """The place along each axis; None where the view is whole."""
    axes: tuple[int, ...]
    """The array's axis for each axis of the view; _ONE for an axis of one element."""

    @staticmethod
    def of(array: int, shape: Sequence[int], kind: str, span: Span = ANY) -> View:
        """A whole array."""
        places = (None,) * len(shape)
        return View(array, tuple(shape), kind, span, places, tuple(range(len(shape))))

    def cut(self, starts: Sequence[Scalar], sizes: Sequence[int]) -> View | None:
        """The view from these places on, of one element or all along each axis; else None."""
        places, axes = list(self.places), list(self.axes)
        for i, (axis, start, size) in enumerate(zip(self.axes, starts, sizes, strict=True)):
            if axis == _ONE or size == self.extents[axis]:
                continue  # JAX clips the place to 0
            if size != 1:
                return None
            places[axis], axes[i] = start, _ONE
        return replace(self, places=tuple(places), axes=tuple(axes))

    def shaped(self, rank: int) -> View | None:
        """The view with as many axes of one element as make up this rank, at the front."""
        whole = [x for x in self.axes if x != _ONE]
        if rank < len(whole):
            return None if any(self.extents[x] != 1 for x in whole) else self._at_first(rank)
        return replace(self, axes=(*(_ONE,) * (rank - len(whole)), *whole))

    def _at_first(self, rank: int) -> View:
        """A view of one element, whose axes are cut at 0."""
        places = tuple(0 if x is None else x for x in self.places)
        return replace(self, places=places, axes=(_ONE,) * rank)

    @property
    def has_one_element(self) -> bool:
        return all(x == _ONE or self.extents[x] == 1 for x in self.axes)

    def element(self, code: Code) -> Register:
        """The only element, as a value in the code.

        Along the only axis of an array, `read` clips the place, so the code is the same for every
        extent. Other places are clipped to constants.

        Raises:
          Unsupported: kernels do not read arrays of this dtype.
        """
        if self.kind not in ("f", "i", "p"):
            raise Unsupported(
                "dtype", f"an array of {self.kind}, where kernels read 32 bits at most"
            )
        places = [0 if x is None else x for x in self.places]
        if len(places) == 1:
            index = places[0]
        else:
            index = 0
            for place, extent in zip(places, self.extents, strict=True):
                inside = clipped(code, place, extent - 1)
                index = _sum(code, _product(code, index, extent), inside)
        register = code.read(self.array, "f" if self.kind == "f" else "i", index, self.span)
        return code.add("p", "ne", register, 0) if self.kind == "p" else register


def clipped(code: Code, x: Scalar, most: int) -> Scalar:
    """An integer between 0 and `most`."""
    low, high = span_of(x)
    if not isinstance(x, Register):
        return min(max(int(x), 0), most)
    if low < 0:
        x = code.add("i", "max", x, 0, span=(0, max(high, 0)))
    if high > most:
        x = code.add("i", "min", x, most, span=(min(max(low, 0), most), most))
    return x


def _product(code: Code, x: Scalar, extent: int) -> Scalar:
    if not isinstance(x, Register):
        return int(x) * extent
    low, high = x.span
    return code.add("i", "mul", x, extent, span=(low * extent, high * extent))


def _sum(code: Code, x: Scalar, y: Scalar) -> Scalar:
    if not isinstance(x, Register) and not isinstance(y, Register):
        return int(x) + int(y)
    if x == 0:
        return y
    (low, high), (low_y, high_y) = span_of(x), span_of(y)
    return code.add("i", "add", x, y, span=(low + low_y, high + high_y))
