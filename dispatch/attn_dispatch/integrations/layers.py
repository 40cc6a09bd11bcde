"""What the layers of all frameworks share: masks, checks of options, and layers that stay."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.static_arguments import (
    Window,
    check_bool,
    check_soft_cap,
    window_sides,
)
from attn_dispatch.warning import warn_of_convention

_RESULTS = ("return_residual", "return_lse", "return_max_logits")

_ATTENTION = re.compile(r"(?!.*linear).*(attention|attn)(layer)?", re.IGNORECASE)


def as_bool(mask: ArrayLike) -> jax.Array:
    """A mask of bools or numbers as bools: True where it is not 0."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


def is_array(x: object) -> TypeGuard[jax.Array | np.ndarray]:
    return isinstance(x, jax.Array | np.ndarray)


def text_of(x: object) -> str:
    """An argument's value in a message; of an array, its dtype and shape."""
    if is_array(x):
        aval = jax.typeof(x)
        return f"{aval.dtype.name}{list(aval.shape)}"
    return repr(x)


def is_same(x: object, y: object) -> bool:
    """Whether x and y are one object, or equal static values."""
    if x is y:
        return True
    is_static = all(isinstance(z, bool | int | float | str | tuple | type) for z in (x, y))
    return is_static and x == y


def check_options(
    options: Mapping[str, object], counterparts: Mapping[str, str] | None = None
) -> None:
    """Check the options of `attn_dispatch.dot_product_attention` that a layer passes on.

    Args:
      options: the caller's options, by name.
      counterparts: by option that must not be given, the framework's argument to use instead.

    Raises:
      ValueError: the framework has another argument for an option, qkv_layout is not the layer's,
        or an option asks for further results, which a layer cannot return.
    """
    for name, other in (counterparts or {}).items():
        if name in options:
            raise ValueError(f"{name}: expected {other} instead, got {name}={options[name]!r}")
    check_layout(options)
    for name in _RESULTS:
        if options.get(name):
            raise ValueError(
                f"{name}: expected no further results in a layer, which returns one array, got "
                f"{options[name]!r}; attn_dispatch.dot_product_attention returns them"
            )


def check_layout(options: Mapping[str, object]) -> None:
    """Check that options do not change the order of axes.

    Raises:
      ValueError: qkv_layout differs from the framework's.
    """
    if options.get("qkv_layout") not in (None, "BTNH"):
        raise ValueError(
            "qkv_layout: expected 'BTNH', the order of axes in which the framework passes its "
            f"heads, got {options['qkv_layout']!r}"
        )


def check_not_given(options: Mapping[str, object], names: Collection[str], maker: str) -> None:
    """Check that options, which hold for every call, have none of the arguments of each call.

    Args:
      options: what the user gave, by name.
      names: the arguments that a layer passes, or is passed, in each call.
      maker: the name of the function that the user called with the options, for messages.

    Raises:
      ValueError: they have one.
    """
    for name in names:
        if name in options:
            raise ValueError(f"{name}: expected it in each call of the layer, got it in {maker}(…)")


def check_static_values(options: Mapping[str, object]) -> None:
    """Check the values that are known before any call: of the window, soft cap and booleans.

    Raises:
      ValueError: one is not what `attn_dispatch.dot_product_attention` takes.
    """
    window_sides(cast("Window", options.get("local_window_size")))
    check_soft_cap(options.get("logits_soft_cap"), np.float64)
    for name in ("is_causal", "deterministic_backward"):
        check_bool(name, options.get(name, False))


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


def has_name_of_attention(layer: object) -> bool:
    """Whether a layer's class is named like softmax attention, such as SelfAttention."""
    return _ATTENTION.fullmatch(type(layer).__name__) is not None


def warn_of_staying(staying: Sequence[str], options: Mapping[str, object], remedy: str) -> None:
    """Warn of the layers that stay in a model of which others were replaced.

    Args:
      staying: each layer's place and type.
      options: what `replace_attention` was given.
      remedy: what to do instead, as the end of a sentence.
    """
    if staying:
        lost = ", ".join(f"{name}={text_of(value)}" for name, value in options.items())
        warn_of_convention(
            f"replace_attention: these layers stay as they are{f', without {lost}' * bool(lost)}: "
            f"{'; '.join(dict.fromkeys(staying))}. {remedy}"
        )
