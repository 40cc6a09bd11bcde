"""Options that a user sets once, merged with what a framework's layer passes in each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any  # noqa: TID251  # the arguments of a framework's layer

import jax
import numpy as np

Attention = Callable[..., jax.Array]


def with_options(function: Attention, options: Mapping[str, Any], maker: str) -> Attention:
    """The function with options that a layer's arguments do not override.

    An argument that the layer passes with the function's default counts as not passed.

    Args:
      function: the attention function, with a default for each argument that a layer may leave out.
      options: the user's options, by name.
      maker: the name of the function that the user called with them, for messages.

    Returns:
      A function with the same signature. It raises a ValueError if the layer passes another value
      than the user and the default.
    """
    parameters = inspect.signature(function).parameters
    names, defaults = list(parameters), {name: x.default for name, x in parameters.items()}

    @functools.wraps(function)
    def merged(*args: Any, **passed: Any) -> jax.Array:
        given = dict(zip(names, args, strict=False)) | passed
        check_no_conflict(options, given, defaults, maker)
        return function(**given | dict(options))

    return merged


def check_no_conflict(
    options: Mapping[str, object],
    given: Mapping[str, object],
    defaults: Mapping[str, object],
    maker: str,
) -> None:
    """Check that a call passes the options as they are, or with their defaults, or not at all.

    Raises:
      ValueError: it passes another value; `maker` is the name of what sets the options.
    """
    for name, value in options.items():
        default = defaults.get(name)
        if name not in given or any(is_same(given[name], x) for x in (value, default)):
            continue
        got = given[name]
        raise ValueError(
            f"{name}: expected {text_of(value)}, as {maker}({name}=…) sets it, or the default "
            f"{default!r} from the layer, got "
            + ("another array " * (is_array(value) and is_array(got)) + text_of(got))
        )


def is_array(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def text_of(x: object) -> str:
    """An argument's value in a message; of an array, its dtype and shape."""
    if isinstance(x, jax.Array | np.ndarray):
        aval = jax.typeof(x)
        return f"{aval.dtype.name}{list(aval.shape)}"
    return repr(x)


def is_same(x: object, y: object) -> bool:
    """Whether x and y are one object, or equal static values."""
    if x is y:
        return True
    is_static = all(isinstance(z, bool | int | float | str | tuple | type) for z in (x, y))
    return is_static and x == y


def partials_of(function: Attention, frame: FrameType | None) -> list[functools.partial[Any]]:
    """The partials of a function among the variables of its caller, and the fields of its `self`.

    A function does not see whether it was called through a partial; a layer's frame shows it.
    """
    if frame is None:
        return []
    held = dict(frame.f_locals)
    held |= getattr(held.get("self"), "__dict__", {})
    return [x for x in held.values() if isinstance(x, functools.partial) and x.func is function]


def overridden(
    partials: list[functools.partial[Any]], received: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a partial that its caller has overridden: names with the partial's values.

    Args:
      partials: those that may have been called.
      received: the arguments that their function received.
    """
    differing = [
        {
            name: value
            for name, value in partial.keywords.items()
            if name in received and not is_same(value, received[name])
        }
        for partial in partials
    ]
    return differing[0] if len(differing) == 1 else {}
