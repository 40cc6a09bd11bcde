"""What surrounds a call without being an argument of it: targets to plan for, fallback policy.

Both are kept in a `jax.make_user_context`, so a change of either misses JAX's caches and the call
is lowered again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax

FallbackPolicy = Literal["warn", "error", "silent"]


@dataclass(frozen=True)
class Settings:
    """The settings in force; `targets` are unparsed, as the caller named them."""

    targets: tuple[str, ...]
    fallback: FallbackPolicy


_context = jax.make_user_context(None)


def current() -> Settings:
    """The innermost `with` block's settings, else those of the environment."""
    value = _context.value
    return value if value is not None else _from_environment()


def _from_environment() -> Settings:
    names = os.environ.get("ATTN_DISPATCH_TARGET", "")
    # A device-property JSON has commas of its own.
    targets = (names,) if names.lstrip().startswith("{") else tuple(names.split(","))
    targets = tuple(name.strip() for name in targets if name.strip())
    return Settings(targets, _checked_policy(os.environ.get("ATTN_DISPATCH_FALLBACK", "warn")))


def _checked_policy(policy: Any) -> FallbackPolicy:
    if policy not in get_args(FallbackPolicy):
        raise ValueError(f"fallback: expected one of {get_args(FallbackPolicy)}, got {policy!r}")
    return policy


@contextmanager
def override(**changes: Any) -> Iterator[None]:
    """A block in which these settings differ."""
    with _context(replace(current(), **changes)):
        yield


@contextmanager
def fallback(policy: FallbackPolicy) -> Iterator[None]:
    """Within the block, do this where XLA replaces a vendor kernel that cannot run a call.

    Args:
      policy: "warn" (the default; once per call specification, with every reason), "error"
        (NotImplementedError with every reason), or "silent". The environment variable
        ATTN_DISPATCH_FALLBACK sets the policy outside such blocks.

    Raises:
      ValueError: for any other policy.
    """
    with override(fallback=_checked_policy(policy)):
        yield
