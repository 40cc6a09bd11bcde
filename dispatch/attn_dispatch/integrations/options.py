"""Options of our call that go along through a layer of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RESULTS = ("return_residual", "return_lse", "return_max_logits")


def check_options(
    options: Mapping[str, Any], counterparts: Mapping[str, str] | None = None
) -> None:
    """Check options whose names the call has.

    Args:
      options: as the caller gave them, by name.
      says: what else says the same in the framework, by the option that must not say it too.

    Raises:
      ValueError: an option the framework has another argument for, another order of axes than
        layers hand on, or further results, which a layer has no place for.
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


def check_layout(options: Mapping[str, Any]) -> None:
    """Check that options leave the order of axes as it is.

    Raises:
      ValueError: qkv_layout is another than that of a framework.
    """
    if options.get("qkv_layout", "BTNH") != "BTNH":
        raise ValueError(
            "qkv_layout: expected 'BTNH', the order of axes in which the framework hands its heads "
            f"on, got {options['qkv_layout']!r}"
        )
