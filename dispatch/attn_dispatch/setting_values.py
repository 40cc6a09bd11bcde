"""The values of settings, whether a caller or an environment variable gives them, and their checks.

Each check returns the value as `Settings` has it, or raises a ValueError with what was expected and
what was given.
"""

from __future__ import annotations

import math
import operator
import re
from contextlib import suppress
from typing import Literal, SupportsIndex, get_args

from attn_dispatch.choices import check_choice
from attn_dispatch.environment import OFF

FallbackPolicy = Literal["warn", "error", "silent"]
ShardedDropout = Literal["own", "same"]
ContextParallel = Literal["auto", "heads", "gather", "ring", "halo"]

_POLICIES_ELSEWHERE = {"raise": "error", "ignore": "silent", "off": "silent", "none": "silent"}
_STRATEGIES_ELSEWHERE = {
    "ulysses": "heads", "alltoall": "heads", "a2a": "heads", "p2p": "ring",
    "heads+ring": "heads+ring takes two mesh axes: shard the heads along one before the call, and "
    "name 'ring', which goes along the other",
}  # fmt: skip
"""By what other libraries say, the name here."""

ScratchLimit = int | float | Literal["off"] | None
"""Bytes, a share of the device's memory (a float up to 1), "off", or None, the default."""


def checked_policy(policy: object, name: str = "fallback") -> FallbackPolicy:
    return check_choice(name, policy, get_args(FallbackPolicy), _POLICIES_ELSEWHERE)


def checked_dropout(choice: object, name: str = "sharded_dropout") -> ShardedDropout:
    return check_choice(name, choice, get_args(ShardedDropout))


def checked_context(strategy: object, name: str = "context_parallel") -> ContextParallel:
    return check_choice(name, strategy, get_args(ContextParallel), _STRATEGIES_ELSEWHERE)


def checked_bool(wanted: object, name: str) -> bool:
    if not isinstance(wanted, bool):
        raise ValueError(f"{name}: expected True or False, got {wanted!r}")
    return wanted


def checked_seconds(seconds: object, name: str = "seconds") -> float:
    """The seconds as a float; ValueError unless they are positive and finite."""
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        if 0 < seconds < float("inf"):
            return float(seconds)
    raise ValueError(f"{name}: expected a positive number of seconds, got {seconds!r}")


_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt]i?)?b|(%))?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def checked_scratch(limit: object, name: str = "scratch_limit") -> ScratchLimit:
    """A limit from the caller or the environment as bytes, a share, "off" or None."""
    if limit is None or (isinstance(limit, str) and limit.lower() == OFF):
        return None if limit is None else OFF
    if isinstance(limit, SupportsIndex) and not isinstance(limit, bool):
        with suppress(TypeError):  # an array that is no integer has __index__ as well
            number_of_bytes = operator.index(limit)
            if number_of_bytes > 0:
                return number_of_bytes
    if isinstance(limit, str) and (found := _SIZE.fullmatch(limit.strip())):
        number = float(found[1])
        if found[3] and 0 < number <= 100:
            return number / 100
        size = number * (_UNITS | _BINARY_UNITS)[(found[2] or "").lower()]
        if not found[3] and 1 <= size < math.inf:
            return int(size)
    got = f"{limit!r:.60}"
    raise ValueError(
        f"{name}: expected a positive number of bytes, a size like '2GB', a share of the device's "
        f"memory like '25%', 'off' or None, got {got}"
    )
