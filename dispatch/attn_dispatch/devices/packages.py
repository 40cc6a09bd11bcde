"""Versions of the packages that implementations need, found without importing them."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from attn_dispatch.reason import Reason


def version_of(*names: str) -> str | None:
    """The version of the first of these packages that is installed; None if none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def package_reason(
    rule: str, name: str, found: str | None, versions: tuple[str, str], distribution: str
) -> Reason | None:
    """Why a package cannot be used; None if it can.

    Args:
      rule: the name of the reason's rule.
      name: the package's name.
      found: the installed version; None without one.
      versions: the oldest that can be used, and the first newer one that cannot.
      distribution: the name to install it by, for JAX 0.11.2, which needs Python 3.12.
    """
    oldest, first_unknown = versions
    if found is None:
        needs = ", which needs Python 3.12" if sys.version_info < (3, 12) else ""
        text, remedy = f"{name} is not installed", f"pip install {distribution}{needs}"
        return Reason(rule, (("installed", ""),), text, remedy)
    if _numbers(oldest) <= _numbers(found) < _numbers(first_unknown):
        return None
    text = f"{name} from {oldest} to below {first_unknown} is needed, and {found} is installed"
    return Reason(rule, (("installed", found),), text)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 3, 6) for "0.3.6+cu130"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
