"""Checks of attn_dispatch's options that are passed through a framework's layer."""

from __future__ import annotations

from collections.abc import Mapping

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
