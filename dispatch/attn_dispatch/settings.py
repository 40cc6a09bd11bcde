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
from pathlib import Path
from types import TracebackType
from typing import Literal, ParamSpec, SupportsIndex, TypeVar, cast, get_args

import jax
import platformdirs

from attn_dispatch.choices import check_choice
from attn_dispatch.environment import TRUST_FILES, flag, variable

P = ParamSpec("P")
R = TypeVar("R")

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

OFF = "off"
"""The value of a variable for a file or folder that turns saving off."""

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
        _checked_policy(*variable("ATTN_DISPATCH_FALLBACK", "warn")),
        _checked_dropout(*variable("ATTN_DISPATCH_SHARDED_DROPOUT", "own")),
        flag("ATTN_DISPATCH_CHECK"),
        flag("ATTN_DISPATCH_REWRITES", "1"),
        aiter_asm=flag(AITER_ASM, "1"),
        tuning_seconds=_tuning_seconds(),
        scratch_limit=_checked_scratch(os.environ.get(SCRATCH_LIMIT) or None, SCRATCH_LIMIT),
        finite_padding=flag(FINITE_PADDING),
        context_parallel=_checked_context(*variable(CONTEXT_PARALLEL, "auto")),
    )


def _tuning_seconds() -> float | None:
    text, name = variable(TUNING, "")
    try:
        return checked_seconds(float(text), name) if text.lower() not in ("", "0", OFF) else None
    except ValueError:
        raise ValueError(f"{name}: expected a positive number of seconds, got {text!r}") from None


def _checked_policy(policy: object, name: str = "fallback") -> FallbackPolicy:
    return check_choice(name, policy, get_args(FallbackPolicy), _POLICIES_ELSEWHERE)


def _checked_dropout(choice: object, name: str = "sharded_dropout") -> ShardedDropout:
    return check_choice(name, choice, get_args(ShardedDropout))


def _checked_context(strategy: object, name: str = "context_parallel") -> ContextParallel:
    return check_choice(name, strategy, get_args(ContextParallel), _STRATEGIES_ELSEWHERE)


def _checked_bool(wanted: object, name: str) -> bool:
    if not isinstance(wanted, bool):
        raise ValueError(f"{name}: expected a bool, got {wanted!r}")
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


def _checked_scratch(limit: object, name: str = "scratch_limit") -> ScratchLimit:
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
    raise ValueError(
        f"{name}: expected a positive number of bytes, a size like '2GB', a share of the device's "
        f"memory like '25%', 'off' or None, got {limit!r}"
    )


def cache_path(variable: str, name: str) -> Path | None:
    """The path of a file or folder saved for other processes; it need not exist.

    The environment variable names it; by default it is `name` in the user's cache folder. None if
    the variable is "off", or if the user has no home folder, as in some containers.
    """
    named = os.environ.get(variable)
    if named and named.lower() == OFF:
        return None
    if named:
        return Path(os.path.expanduser(named))
    try:
        return platformdirs.user_cache_path("attn-dispatch") / name
    except RuntimeError:
        return None


def why_no_cache_path(variable: str) -> str:
    """Why `cache_path` returns None for this variable."""
    named = os.environ.get(variable)
    return f"{variable}={named}" if named else f"you have no home folder, and no {variable}"


def restored(value: Settings) -> AbstractContextManager[None]:
    """A block in which these are the settings in force."""
    return _context(_InForce(value, forced=_in_force().forced))


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


def fallback(policy: FallbackPolicy) -> Block:
    """Choose what happens, within the block, if no GPU kernel can run a call and XLA would run it.

        with attn_dispatch.fallback("error"):
            step(params, batch)

    Args:
      policy: "warn" (the default) warns once for each kind of call with an
        `AttentionFallbackWarning` that lists every reason. "error" raises a NotImplementedError
        with every reason, on a CPU too for the GPUs that `attn_dispatch.target` names. "silent"
        does nothing. The environment variable ATTN_DISPATCH_FALLBACK sets the policy outside such
        blocks.

    Raises:
      ValueError: for any other policy.
    """
    checked = _checked_policy(policy)
    return Block("fallback", {"fallback": checked})


def sharded_dropout(choice: ShardedDropout) -> Block:
    """Choose, within the block, whether dropout masks may depend on the number of devices.

    Args:
      choice: "own" (the default): each device draws from a different key, so another number of
        devices gives another mask. "same": the mask is the same on any number of devices. Calls
        with dropout, on a single device too, then run only on implementations that draw by the
        position in the whole call; of those included, XLA alone does. The environment variable
        ATTN_DISPATCH_SHARDED_DROPOUT sets the choice outside such blocks.

    Raises:
      ValueError: for anything else.
    """
    checked = _checked_dropout(choice)
    return Block("sharded_dropout", {"sharded_dropout": checked})


def context_parallel(strategy: ContextParallel) -> Block:
    """Choose, within the block, how calls are split whose arrays are sharded along the sequence.

        with attn_dispatch.context_parallel("ring"):
            step(params, batch)

    Args:
      strategy: "heads" exchanges the sequence for heads, so that each device has whole sequences of
        some heads. "gather", "ring" and "halo" leave rows where they are: each device gathers all
        keys, or passes them around, or receives the keys of a causal window from the device before
        it. "auto" (the default) takes the one with the least modelled time, which `explain` shows.
        So does a name that cannot run a call, except "heads": if heads and batch do not divide,
        devices repeat work, with a warning. The environment variable ATTN_DISPATCH_CONTEXT_PARALLEL
        sets the strategy outside such blocks.

    Raises:
      ValueError: for any other strategy.
    """
    checked = _checked_context(strategy)
    return Block("context_parallel", {"context_parallel": checked})


def rewrites(wanted: bool) -> Block:
    """Choose, within the block, whether a call that a kernel does not run may be rewritten.

    A rewrite turns the call into one that the kernel runs, with the same results; `explain` names
    the rewrites of a call.

    Args:
      wanted: True (the default) rewrites such calls; False leaves them to XLA. The environment
        variable ATTN_DISPATCH_REWRITES=0 means False outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    checked = _checked_bool(wanted, "rewrites")
    return Block("rewrites", {"rewrites": checked})


def aiter_asm(wanted: bool) -> Block:
    """Choose, within the block, whether AITER's hand-written ASM kernels may run calls.

    Args:
      wanted: True (the default) takes them wherever they run a call. False leaves their calls to
        AITER's CK kernels, and to XLA where CK is not built or does not run them. The environment
        variable ATTN_DISPATCH_AITER_ASM=0 means False outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    checked = _checked_bool(wanted, "aiter_asm")
    return Block("aiter_asm", {"aiter_asm": checked})


def finite_padding(promised: bool) -> Block:
    """Promise, within the block, that padding rows of query, key, value and out_grad are finite.

        with attn_dispatch.finite_padding(True):
            step(params, batch)

    Kernels then read these arrays as they are. Otherwise `flash` and `fa4` first set padding rows
    to 0, for which XLA copies arrays that anything else reads. The argument `finite_padding` of a
    call goes before this. See `dot_product_attention` for what NaN does where the promise is
    broken.

    Args:
      promised: True promises it. False (the default) does not. The environment variable
        ATTN_DISPATCH_FINITE_PADDING=1 means True outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    checked = _checked_bool(promised, "finite_padding")
    return Block("finite_padding", {"finite_padding": checked})


def scratch_limit(limit: int | str | None) -> Block:
    """Limit the scratch memory that a call may take, within the block.

        with attn_dispatch.scratch_limit("2GB"):
            step(params, batch)

    Scratch memory is what a call allocates beside its operands and results, in each direction. A
    call that would take more is computed in parts of the batch or of the heads, one after the
    other; gradients of operands that the parts share, such as a bias, are summed in float32.
    `explain` shows a call's scratch memory and its parts.

    Args:
      limit: bytes, or a size such as "500MB", "2GB" or "2GiB", or a share of the device's memory
        such as "5%". A kernel that takes more even in the smallest parts is not used. None, the
        default: 1.25 times what kernels take that keep no scores in memory, no more than XLA takes
        for the same call, at least 1/64 and at most 1/16 of the device's memory. A kernel that
        takes more even in the smallest parts is then used nevertheless. "off": no limit. The
        environment variable ATTN_DISPATCH_SCRATCH_LIMIT sets the limit outside such blocks.

    Raises:
      ValueError: for anything else.
    """
    checked = _checked_scratch(limit)
    return Block("scratch_limit", {"scratch_limit": checked})


def tuning(seconds: float = 30.0) -> Block:
    """Measure, within the block, what runs each call fastest on this device, and save the winner.

        with attn_dispatch.tuning(seconds=30):
            step(params, batch)  # the first call of a jitted step

    When a call without a saved winner is compiled, every implementation that can run it runs on
    random arrays, and so do cuDNN's other engines. Candidates whose results differ from those of
    the untuned choice are dropped. The fastest of the others is saved in a file, for this device
    and these library versions. Later calls use it, in other processes too, and `explain` shows it.
    The forward and the backward pass are tuned separately. Calls with dropout are not tuned,
    because both passes must draw the same mask.

    Tuning allocates arrays of the call's size beside the program's arrays. The block may be around
    the first call of a jitted function, or inside it around the attention calls to tune. A program
    that is compiled already is compiled again inside the block, and is unchanged outside it.

    The environment variable ATTN_DISPATCH_TUNING, a number of seconds, tunes without a block.
    ATTN_DISPATCH_WINNERS names the file.

    Args:
      seconds: the time, for each call and direction, after which no further candidate is tried.

    Raises:
      ValueError: for anything but a positive number of seconds.
    """
    checked = checked_seconds(seconds)
    return Block("tuning", {"tuning_seconds": checked})
