"""Replaces attributes of other packages, temporarily or for good, and counts what goes through."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple, ParamSpec, TypeVar  # noqa: TID251  # another package's function

import jax

from attn_dispatch.integrations.layers import text_of
from attn_dispatch.warning import caller, warn_of_convention

P = ParamSpec("P")
R = TypeVar("R")

Place = tuple[object, str]
"""A module or class, and the name of an attribute of it."""

_lock = RLock()
_originals: dict[tuple[int, str], Callable[..., Any]] = {}
_started: list[Patch] = []


class Patch:
    """Replaces attributes inside `with patch:`, or from `patch.start()` to `patch.stop()`.

    A patch applies to the whole process, other threads included. Patches may be nested and may end
    in any order. The latest one that has not ended counts; after the last one the attributes are
    restored.

    `patch.calls` counts the attention calls that went through it. If there were none, a warning at
    the end says what ran instead, which is watched inside `with patch:`.
    """

    def __init__(
        self,
        replacements: Mapping[Place, Callable[..., object]],
        tally: Tally | None = None,
        *,
        may_be_unused: bool = False,
    ) -> None:
        """Make a patch that has not been started.

        Args:
          replacements: what the attributes become.
          tally: what counts the calls of these.
          may_be_unused: whether not to warn.
        """
        self.replacements = replacements
        self._started = 0
        self._tally = tally
        self._warns = tally is not None and not may_be_unused
        self._since = self._until = _State(0, 0)
        self._watches: list[Patch] = []

    @property
    def calls(self) -> int:
        """The number of attention calls since the patch was started, until it ended.

        A program that `jax.jit` compiles counts when it is traced.
        """
        until = self._tally.state if self._tally is not None and self._started else self._until
        return until.calls - self._since.calls

    def start(self) -> Patch:
        with _lock:
            for (owner, name), _ in self.replacements.items():
                if not any(_replaces(patch, owner, name) for patch in _started):
                    _originals[id(owner), name] = getattr(owner, name)
            _started.append(self)
            if self._tally is not None and not self._started:
                self._since = self._tally.state
            self._started += 1
            self._apply_latest()
        return self

    def stop(self) -> None:
        """End the latest `start` of this patch.

        Raises:
          RuntimeError: the patch has not been started.
        """
        self._end()
        if self._tally is not None and self._warns and not self._started:
            originals = [original(*place) for place in self.replacements]
            self._tally.warn_if_unused(self._since, originals)

    def _end(self) -> None:
        with _lock:
            if not self._started:
                raise RuntimeError("stop: expected a patch that has been started")
            latest = max(i for i, patch in enumerate(_started) if patch is self)
            del _started[latest]
            self._started -= 1
            if self._tally is not None:
                self._until = self._tally.state
            self._apply_latest()

    def __enter__(self) -> Patch:
        if self._tally is not None and self._warns:
            softmax = (jax.nn, "softmax")
            watch = Patch({softmax: self._tally.watched(original(*softmax))})
            self._watches.append(watch.start())
        return self.start()

    def __exit__(self, error: object, *_: object) -> None:
        if self._watches:
            self._watches.pop().stop()
        if error is None:
            self.stop()
        else:
            self._end()

    def _apply_latest(self) -> None:
        """Set each attribute to the replacement of its latest patch."""
        for owner, name in self.replacements:
            patches = [patch for patch in _started if _replaces(patch, owner, name)]
            if patches:
                setattr(owner, name, patches[-1].replacements[owner, name])
            else:
                setattr(owner, name, _originals.pop((id(owner), name)))


def original(owner: object, name: str) -> Callable[..., Any]:
    """The attribute's value without patches."""
    with _lock:
        return _originals.get((id(owner), name)) or getattr(owner, name)


def _replaces(patch: Patch, owner: object, name: str) -> bool:
    return (owner, name) in patch.replacements


_SCORES_DIMS = 3
"""The fewest dims of attention scores: heads, queries, keys."""
_MOST_SEEN = 3
"""How many of each kind a warning lists."""
_MAX_SOFTMAXES = 256


class _State(NamedTuple):
    calls: int
    softmaxes: int


class Tally:
    """Counts the calls of the functions that a patch puts in place, in the whole process."""

    def __init__(self, patch: str, replaced: str) -> None:
        """Start at 0.

        Args:
          patch: the name of the function that makes the patches.
          replaced: what they replace, for messages.
        """
        self.patch, self.replaced = patch, replaced
        self._calls = 0
        self._softmaxes: list[str] = []

    @property
    def state(self) -> _State:
        return _State(self._calls, len(self._softmaxes))

    def counted(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose calls count."""

        @functools.wraps(function)
        def counting(*args: P.args, **kwargs: P.kwargs) -> R:
            self._calls += 1
            return function(*args, **kwargs)

        return counting

    def watched(self, softmax: Callable[P, R]) -> Callable[P, R]:
        """The softmax, of which the lines are noted where its input may be attention scores."""

        @functools.wraps(softmax)
        def watching(*args: P.args, **kwargs: P.kwargs) -> R:
            x = args[0] if args else kwargs.get("x")
            is_kept = len(self._softmaxes) < _MAX_SOFTMAXES
            if is_kept and isinstance(x, jax.Array) and x.ndim >= _SCORES_DIMS:
                where = ":".join(map(str, caller() or ("an unknown line",)))
                self._softmaxes.append(f"a softmax of {text_of(x)} at {where}")
            return softmax(*args, **kwargs)

        return watching

    def warn_if_unused(self, since: _State, originals: Iterable[Callable[..., object]]) -> None:
        """Warn if nothing was counted, unless a program traced earlier may have run.

        Such a program calls no Python function. It may exist once an earlier call was counted, and
        then only a softmax in the block shows that other attention ran.

        Args:
          since: the state when the patch was started.
          originals: the functions that it replaced.
        """
        softmaxes = self._softmaxes[since.softmaxes :]
        if self._calls > since.calls or (self._calls and not softmaxes):
            return
        seen = [
            *list(dict.fromkeys(softmaxes))[:_MOST_SEEN],
            *list(_early_imports(originals))[:_MOST_SEEN],
        ]
        instead = f" Seen instead: {'; '.join(seen)}." if seen else ""
        warn_of_convention(
            f"{self.patch}: nothing called {self.replaced} while it was in place.{instead} A patch "
            "does not reach attention by einsum, functions imported earlier, and programs that "
            f"jax.jit traced earlier. {self.patch}(may_be_unused=True) does not warn"
        )


def _early_imports(originals: Iterable[Callable[..., object]]) -> Iterator[str]:
    """The names by which modules of other packages hold the originals."""
    functions = [x for x in originals if isinstance(x, FunctionType)]
    homes = {x.__module__.partition(".")[0] for x in functions}
    modules = {id(x): (name, x) for name, x in reversed(list(sys.modules.items()))}
    for module_name, module in reversed(list(modules.values())):  # by each module's first name
        if module_name.partition(".")[0] in homes:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if any(value is x for x in functions):
                yield f"{module_name}.{name}, imported before the patch"
