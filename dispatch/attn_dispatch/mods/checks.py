"""Checks of the arguments of ready-made mods. Each returns its value in normal form."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.mod_facts import Size
from attn_dispatch.call.static_arguments import shown

Numbers: TypeAlias = (
    ArrayLike | Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
)
"""An array, a number, or lists of numbers."""

_KINDS = {"floating": jnp.floating, "integer": jnp.integer}


def check_array(name: str, value: Numbers, kind: str, *shapes: tuple[str, ...]) -> jax.Array:
    """The value as an array of this kind ("floating" or "integer") and one of these ranks."""
    expected = " or ".join(f"[{', '.join(shape)}]" for shape in shapes)
    expected = f"{name}: expected an array {expected} of {kind} dtype, got "
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:  # a text, or lists of different lengths
        raise ValueError(f"{expected}{value!r:.60}") from error
    is_kind = jnp.issubdtype(array.dtype, _KINDS[kind])
    if not is_kind or array.ndim not in {len(shape) for shape in shapes}:
        raise ValueError(f"{expected}{array.dtype.name}{list(array.shape)}")
    return array


def sizes(name: str, axes: Sequence[str], array: jax.Array) -> tuple[Size, ...]:
    """The sizes along these axes, the first ones of the array of this argument."""
    return tuple(Size(name, *x) for x in zip(axes, array.shape, strict=False))


def check_int(name: str, value: SupportsIndex, least: int) -> int:
    """The value as a static int of at least `least`."""
    try:
        number = operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError):
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}: expected a static int from {least} on, got {shown(value)}")
    if number >= 2**31:
        raise ValueError(f"{name}: expected a static int below 2^31, got {number}")
    return number


class RowNumber:
    """A number for each batch row: an int, an integer array [], or one [B]."""

    def __init__(self, name: str, value: Numbers):
        self._name = name
        # An int stays an int: it becomes part of the program and is not read from memory.
        self._value: jax.Array | int = (
            check_int(name, value, 0)
            if isinstance(value, int)
            else check_array(name, value, "integer", (), ("B",))
        )

    def of(self, b: jax.Array) -> jax.Array | int:
        if isinstance(self._value, int) or self._value.ndim == 0:
            return self._value
        return self._value[b]

    @property
    def sizes(self) -> tuple[Size, ...]:
        if isinstance(self._value, int):
            return ()
        return sizes(self._name, ("B",) * self._value.ndim, self._value)
