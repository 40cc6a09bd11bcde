"""causal_alignment in its normal form: a corner, or the number of the key level with query 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.options import Alignment, CausalAlignment
from attn_dispatch.call.shapes import CallShape
from attn_dispatch.call.values import as_int32
from attn_dispatch.choices import did_you_mean

_FARTHEST = 2**29
"""Offsets beyond it count as it, so that sums of a position, an offset and a window stay in int32.
They hide the same pairs, as no length is near it."""

_BAND = (None, None)

_ELSEWHERE = {"upperleft": "top_left", "lowerright": "bottom_right", "bottom": "bottom_right"}
"""By what other libraries say, the name of a corner here."""

_MISSPELT = 0.9
"""Another corner, as "bottom_left", is not meant to be one of these two: the numbers differ."""


@dataclass(frozen=True)
class Diagonal:
    """The fields of `Meaning` that say where the diagonal is and what is seen around it."""

    causal_alignment: Alignment
    is_causal: bool
    window: tuple[int | None, int | None]
    causal_offset: int = 0
    operand: jax.Array | None = None
    """The operand `causal_offset`, if the offset is an array."""


@dataclass(frozen=True)
class Counted:
    """What else is given that a diagonal matters to, or is found from."""

    has_distances: bool
    """A window of arrays, or ALiBi."""
    has_lengths: bool
    """Lengths of batch rows, or several sequences in them."""


def diagonal_of(
    given: CausalAlignment | ArrayLike | None,
    shape: CallShape,
    counted: Counted,
    *,
    is_causal: bool,
    window: tuple[int | None, int | None],
) -> Diagonal:
    """The normal form of causal_alignment. An offset that changes nothing is dropped.

    Raises:
      ValueError: if it is no corner, int or integer array, or its shape does not fit the call.
    """
    if given is None or isinstance(given, str):
        return Diagonal(_corner("top_left" if given is None else given), is_causal, window)
    is_static = isinstance(given, int | np.integer) and not isinstance(given, bool)
    array = None if is_static else _array(given, shape)
    if not (is_causal or window != _BAND or counted.has_distances):
        return Diagonal("top_left", is_causal, window)
    if array is not None:
        return Diagonal("by_offset", is_causal, window, operand=array)
    offset = max(-_FARTHEST, min(int(cast("int", given)), _FARTHEST))
    return _static(offset, shape, counted, Diagonal("by_offset", is_causal, window, offset))


def _corner(given: str) -> Alignment:
    corners = get_args(CausalAlignment)
    if given not in corners:
        raise _wrong(repr(given), did_you_mean(given, corners, _ELSEWHERE, _MISSPELT))
    return cast("CausalAlignment", given)


def _array(given: object, shape: CallShape) -> jax.Array:
    """int32 [...], with dims of 1 if it is one number for all rows."""
    try:
        if isinstance(given, bool):
            raise TypeError
        x = jnp.asarray(cast("ArrayLike", given))
    except (TypeError, ValueError) as error:
        raise _wrong(repr(given)) from error
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise _wrong(f"an array of {x.dtype.name}")
    if x.shape not in ((), shape.leading):
        expected = " or ".join(str(list(x)) for x in dict.fromkeys(((), shape.leading)))
        raise ValueError(
            f"causal_alignment: expected an offset of shape {expected}, got {list(x.shape)}"
        )
    x = jnp.clip(as_int32(x), -_FARTHEST, _FARTHEST)
    return x if x.shape == shape.leading else shape.shared(x)


def _wrong(got: str, hint: str = "") -> ValueError:
    return ValueError(
        f"causal_alignment: expected one of {get_args(CausalAlignment)}, or the offset as an int "
        f"or an integer array, got {got}{hint}"
    )


def _static(offset: int, shape: CallShape, counted: Counted, found: Diagonal) -> Diagonal:
    """A corner, if the offset is one, or no causality and window, if they hide nothing."""
    top_left = Diagonal("top_left", found.is_causal, found.window)
    if offset == 0:
        return top_left
    queries, keys = shape.seq_len_q, shape.seq_len_kv
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return found
    if offset == keys - queries and not counted.has_lengths:
        return Diagonal("bottom_right", found.is_causal, found.window)
    is_causal = found.is_causal and offset < keys - 1
    left, right = found.window
    left = None if left is None or left >= queries - 1 + offset else left
    right = None if right is None or right >= keys - 1 - offset else right
    if not (is_causal or (left, right) != _BAND or counted.has_distances):
        return Diagonal("top_left", is_causal, _BAND)
    return Diagonal("by_offset", is_causal, (left, right), offset)
