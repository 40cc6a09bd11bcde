"""The checks of static arguments: each returns its value in normal form.

They raise a ValueError with what was expected and what was given; none accepts a tracer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal, NewType, SupportsFloat, SupportsIndex, cast

import jax
import numpy as np
from numpy.typing import DTypeLike

from attn_dispatch.choices import did_you_mean
from attn_dispatch.typed_jax import array_type, is_tracer

QkvLayout = Literal["BTNH", "BNTH"]
"""The axes of query, key, value and the output, by the names of jax.nn."""
KvLayout = Literal["NHD", "HND"]
"""The axes of a page, [page, K, H] or [K, page, H], by the names of FlashInfer."""

ImplementationName = Literal["cudnn", "flash", "fa4", "aiter", "xla"]
"""The implementations that are included."""
OwnName = NewType("OwnName", str)
"""The name of another package's implementation, or one that is known only at run time."""
AnyImplementation = ImplementationName | OwnName
Implementations = AnyImplementation | Sequence[AnyImplementation] | None

Side = int | jax.Array | None
Window = int | jax.Array | Sequence[Side] | None


def shown(value: object) -> str:
    """A wrong value as a message shows it; of a traced one also how to make it static."""
    if is_tracer(value):
        return (
            f"{_shown_briefly(value)}; it must be known when the program is traced: under jax.jit, "
            "put the argument that it comes from into static_argnames; in a scan or vmap, make a "
            "call for each value"
        )
    return _shown_briefly(value)


def _shown_briefly(value: object) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        x = array_type(cast("jax.Array", value))
        kind = "a traced" if is_tracer(cast("object", value)) else "an array"
        return f"{kind} {x.dtype.name}{list(x.shape)}"
    if isinstance(value, tuple):
        entries = cast("tuple[object, ...]", value)
        if any(map(is_tracer, entries)):
            return f"({', '.join(map(_shown_briefly, entries))})"
        return repr(entries)
    return repr(value)


def static_float(name: str, value: object, expected: str = "a static number") -> float:
    try:
        if isinstance(value, str | bytes) or _is_bool(value):
            raise TypeError
        return float(cast("SupportsFloat", value))
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that a float holds, got {value}") from error
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}") from error


def _check_range(name: str, value: float, dtype: DTypeLike) -> None:
    """Check that a number is normal in the dtype of scores: float32, float64 for float64 inputs."""
    facts = np.finfo(np.promote_types(dtype, np.float32))
    least, most = float(facts.tiny), float(facts.max)
    if not least <= abs(value) <= most:
        raise ValueError(
            f"{name}: expected a magnitude from {least:.3g} to {most:.3g}, the normal numbers of "
            f"{facts.dtype.name}, got {value:g}"
        )


def check_scale(scale: object, head_dim: int, dtype: DTypeLike) -> float:
    if scale is None:
        # 1 / sqrt(d) of arXiv:1706.03762, section 3.2.1; any number will do where d is 0.
        return 1 / math.sqrt(max(head_dim, 1))
    number = static_float("scale", scale, "a number or a floating array [] or [N]")
    if not math.isfinite(number):
        raise ValueError(f"scale: expected a finite number, got {number}")
    if number != 0:
        _check_range("scale", number, dtype)
    return number


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def check_bool(name: str, value: object) -> bool:
    if not _is_bool(value):
        is_number = isinstance(value, int) and value in (0, 1)
        hint = f"; pass {bool(value)}" if is_number else ""
        raise ValueError(f"{name}: expected True or False, got {shown(value)}{hint}")
    return bool(value)


def window_sides(window: Window) -> tuple[Side, Side]:
    """(left, right), where a side is an int, None if it is open, or a traced integer array []."""
    if window is None:
        return (None, None)
    pair = tuple(window) if isinstance(window, Sequence) else (window, window)
    if len(pair) != 2 or any(isinstance(side, bool) for side in pair):
        raise wrong_window(shown(window))
    try:
        left, right = (_window_side(side) for side in pair)
    except TypeError as error:
        raise wrong_window(shown(window)) from error
    if any(isinstance(side, int) and side < 0 for side in (left, right)):
        raise wrong_window(shown(window))
    return left, right


def _window_side(side: Side) -> Side:
    if isinstance(side, jax.Array) and is_tracer(side):
        if side.ndim == 0 and np.issubdtype(side.dtype, np.integer):
            return side
    return None if side is None else operator.index(side)


def wrong_window(got: object) -> ValueError:
    return ValueError(
        "local_window_size: expected a non-negative int or a pair (left, right) of non-negative "
        "ints or None (also int arrays []), both ends included, with None, not -1, on an open "
        f"side, got {got}"
    )


def check_soft_cap(cap: object, dtype: DTypeLike) -> float | None:
    if cap is None:
        return None
    number = static_float("logits_soft_cap", cap)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"logits_soft_cap: expected a positive number or None, got {number}")
    _check_range("logits_soft_cap", number, dtype)
    return number


_TOKAMAX = "tokamax's are not among them: None takes the best available"
_ELSEWHERE = {
    "fa2": "flash", "fa3": "flash", "flashattention": "flash", "flashattention3": "flash",
    "ck": "aiter", "composablekernel": "aiter",
    "mosaic": _TOKAMAX, "mosaicgpu": _TOKAMAX, "mosaictpu": _TOKAMAX, "triton": _TOKAMAX,
    "xlachunked": _TOKAMAX,
    "pallas": "no kernel in Pallas is among them: None takes the best available",
}  # fmt: skip
"""By what other libraries say, the name of an implementation here, or what to say of it."""


def check_implementation(
    implementation: str | Sequence[str] | None,
    known: tuple[str, ...],
    name: str = "implementation",
) -> tuple[str, ...]:
    if implementation is None:
        return ()
    wanted = (implementation,) if isinstance(implementation, str) else implementation
    wanted = tuple(wanted) if isinstance(wanted, Sequence) else ()
    unknown = [x for x in wanted if x not in known]
    if unknown or not wanted:
        has_comma = isinstance(implementation, str) and "," in implementation
        hints = (did_you_mean(x, known, _ELSEWHERE) for x in unknown)
        hint = "; pass several as a list" if has_comma else next(filter(None, hints), "")
        order = " in order of preference" if name == "implementation" else ""
        raise ValueError(
            f"{name}: expected None, one of {known}, or a list of them{order}; got "
            f"{shown(implementation)}{hint}"
        )
    return wanted


def check_positive_int(name: str, value: object) -> int:
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}: expected a static positive int, got {shown(value)}")
    if number >= 2**31:
        raise ValueError(f"{name}: expected a static int below 2^31, got {number}")
    return number


def check_dropout(rate: object, has_key: bool) -> float:
    share = static_float("dropout_rate", rate)
    if not 0 <= share < 1:
        raise ValueError(f"dropout_rate: expected 0 <= rate < 1, got {share}")
    if share > 0 and not has_key:
        raise ValueError(
            f"dropout_key: expected a JAX PRNG key with dropout_rate={share}, got None; pass "
            "jax.random.key(step), another one in each step and layer"
        )
    return share
