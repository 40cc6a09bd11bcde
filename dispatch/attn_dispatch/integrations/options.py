"""Checks of attn_dispatch's options that are passed through a framework's layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import numpy as np

from attn_dispatch.call.static_arguments import (
    Window,
    check_bool,
    check_soft_cap,
    window_sides,
)

_RESULTS = ("return_residual", "return_lse", "return_max_logits")


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
