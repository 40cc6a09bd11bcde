"""Options of our call that go along through a layer of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RESULTS = ("return_residual", "return_lse", "return_max_logits")


def check_options(options: Mapping[str, Any], says: Mapping[str, str] | None = None) -> None:
    """Check options whose names the call has.

    Args:
      options: as the caller gave them, by name.
      says: what else says the same in the framework, by the option that must not say it too.

    Raises:
      ValueError: an option the framework has another argument for, or further results, which a
        layer has no place for.
    """
    for name, other in (says or {}).items():
        if name in options:
            raise ValueError(f"{name}: expected {other} instead, got {name}={options[name]!r}")
    for name in _RESULTS:
        if options.get(name):
            raise ValueError(
                f"{name}: expected no further results in a layer, which returns one array, got "
                f"{options[name]!r}; attn_dispatch.dot_product_attention returns them"
            )
