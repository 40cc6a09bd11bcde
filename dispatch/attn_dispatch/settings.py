"""Settings that apply to calls without being arguments: targets, policies, switches.

A `jax.make_user_context` holds them, so that changing one misses JAX's caches and lowers the call
again. What `with` blocks set around a call travels with it (`CallSettings`), because JAX may
transform, lower and compile the call after the blocks have ended.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, ParamSpec, SupportsIndex, TypeVar, cast, get_args

import jax

from attn_dispatch.choices import check_choice
from attn_dispatch.environment import OFF, TRUST_FILES, flag, variable

P = ParamSpec("P")
R = TypeVar("R")

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

TUNING = "ATTN_DISPATCH_TUNING"
"""The environment variable with the seconds of tuning for each call; "off" disables tuning."""

AITER_ASM = "ATTN_DISPATCH_AITER_ASM"
"""The environment variable that turns AITER's ASM kernels off with 0."""

FINITE_PADDING = "ATTN_DISPATCH_FINITE_PADDING"
"""The environment variable of `finite_padding`."""

POISON = "ATTN_DISPATCH_POISON"
"""The environment variable that fills results with NaN before each kernel runs, with 1. The C++
libraries read it when a call is compiled (common_backend/environment.h)."""

CONTEXT_PARALLEL = "ATTN_DISPATCH_CONTEXT_PARALLEL"
"""The environment variable of `context_parallel`."""

SCRATCH_LIMIT = "ATTN_DISPATCH_SCRATCH_LIMIT"
"""The environment variable of `scratch_limit`."""


@dataclass(frozen=True)
class Settings:
    """The settings in force. `targets` are the names that the caller gave, not parsed."""

    targets: tuple[str, ...]
    fallback: FallbackPolicy
    sharded_dropout: ShardedDropout
    check: bool = False
    """Check lengths, ids, cu_seqlens and windows even if the host must wait for the device."""
    rewrites: bool = True
    """Rewrite calls that a kernel does not run (core/rewrites)."""
    aiter_asm: bool = True
    """Run AITER's ASM kernels where they can run a call; otherwise CK's alone."""
    first_rewrite: str | None = None
    """The rewrite to apply first, even to a call that the kernel runs. For tests."""
    tuning_seconds: float | None = None
    """The time to tune each call that is lowered (core/tuning); None does not tune."""
    scratch_limit: ScratchLimit = None
    """The most scratch memory of a call; None is a limit for the device (core/scratch.py)."""
    finite_padding: bool = False
    """Padding rows hold finite numbers, for calls that do not say it themselves."""
    context_parallel: ContextParallel = "auto"
    """How a call is split whose arrays are sharded along the sequence."""
    is_exporting: bool = False
    """Whether the lowered program will run in other processes (jax.export)."""
    is_alone: bool = False
    """Whether the call is the whole of the program that is lowered (core/whole_call.py)."""
    is_sketch: bool = False
    """Whether the program is lowered only to find how calls are sharded (core/sketch.py)."""


@dataclass(frozen=True)
class CallSettings:
    """The settings that `with` blocks around a call set. They travel with the call."""

    changes: tuple[tuple[str, object], ...] = ()
    """The name and value of each field of `Settings` that a block sets, ordered by name."""

    def changed(self, changes: Mapping[str, object]) -> CallSettings:
        """These settings in a further block, inside the others."""
        return CallSettings(tuple(sorted({**dict(self.changes), **changes}.items())))

    def over(self, settings: Settings) -> Settings:
        """The settings in force for the call, where `settings` are in force around it."""
        return cast("Callable[..., Settings]", replace)(settings, **dict(self.changes))


@dataclass(frozen=True)
class _InForce:
    """The settings in force, and which of them come from where."""

    settings: Settings
    of_blocks: CallSettings = CallSettings()
    forced: CallSettings = CallSettings()
    """The settings that also hold for calls that bring others."""

    def within(self, changes: CallSettings) -> _InForce:
        """The same where a block or a call sets some settings."""
        return replace(self, settings=self.forced.over(changes.over(self.settings)))


_context = jax.make_user_context(None)


def _in_force() -> _InForce:
    value = cast(_InForce | None, _context.value)
    return value if value is not None else _InForce(_from_environment())


def current() -> Settings:
    """The innermost `with` block's settings, else those of the environment."""
    return _in_force().settings


def of_blocks() -> CallSettings:
    """The settings that the `with` blocks set that are open now."""
    return _in_force().of_blocks


def within(call: CallSettings) -> AbstractContextManager[None]:
    """A block in which the settings of a call are in force, over those around it."""
    return _context(_in_force().within(call)) if call.changes else nullcontext()


def forced(changes: Mapping[str, object]) -> AbstractContextManager[None]:
    """A block in which settings hold even for blocks inside it and for calls that bring others."""
    before = _in_force()
    now = replace(before, forced=before.forced.changed(changes))
    return _context(now.within(CallSettings()))


def _from_environment() -> Settings:
    names = os.environ.get("ATTN_DISPATCH_TARGET", "")
    # Device properties as JSON contain commas.
    targets = (names,) if names.lstrip().startswith("{") else tuple(names.split(","))
    targets = tuple(name.strip() for name in targets if name.strip())
    # Neither changes the lowered program, but an invalid value is an error, as for the others.
    for name in (TRUST_FILES, POISON):
        flag(name)
    return Settings(
        targets,
        checked_policy(*variable("ATTN_DISPATCH_FALLBACK", "warn")),
        checked_dropout(*variable("ATTN_DISPATCH_SHARDED_DROPOUT", "own")),
        flag("ATTN_DISPATCH_CHECK"),
        flag("ATTN_DISPATCH_REWRITES", "1"),
        aiter_asm=flag(AITER_ASM, "1"),
        tuning_seconds=_tuning_seconds(),
        scratch_limit=checked_scratch(os.environ.get(SCRATCH_LIMIT) or None, SCRATCH_LIMIT),
        finite_padding=flag(FINITE_PADDING),
        context_parallel=checked_context(*variable(CONTEXT_PARALLEL, "auto")),
    )


def _tuning_seconds() -> float | None:
    text, name = variable(TUNING, "")
    try:
        return checked_seconds(float(text), name) if text.lower() not in ("", "0", OFF) else None
    except ValueError:
        raise ValueError(f"{name}: expected a positive number of seconds, got {text!r}") from None


def restored(value: Settings) -> AbstractContextManager[None]:
    """A block in which these are the settings in force."""
    return _context(_InForce(value, forced=_in_force().forced))


# Each check returns the value as `Settings` has it, or raises a ValueError with what was expected
# and what was given, whether a caller or an environment variable gave it.


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


class Block:
    """Settings that differ within a `with` block, or in the calls of a function it decorates."""

    def __init__(self, name: str, changes: Mapping[str, object]) -> None:
        """Args:
        name: the public function that made the block, for messages.
        changes: the settings that differ, by the names of the fields of `Settings`.
        """
        self._name = name
        self._changes = changes
        self._entered: AbstractContextManager[None] | None = None
        self._is_used = False

    def __enter__(self) -> None:
        if self._is_used:
            raise RuntimeError(f"{self._name}: expected a new block for each `with`")
        self._is_used = True
        self._entered = self._changed()
        self._entered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._entered is not None
        self._entered.__exit__(kind, error, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        self._is_used = True

        @functools.wraps(function)
        def within_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._changed():
                return function(*args, **kwargs)

        return within_block

    def _changed(self) -> AbstractContextManager[None]:
        before = _in_force()
        now = replace(before, of_blocks=before.of_blocks.changed(self._changes))
        return _context(now.within(CallSettings().changed(self._changes)))

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                f"{self._name}(...) sets nothing by itself: write `with {self._name}(...):` around "
                "the calls, or set the environment variable of docs/settings.md",
                RuntimeWarning,
                stacklevel=2,
            )
