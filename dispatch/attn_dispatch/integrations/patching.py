"""Replaces attributes of other packages, temporarily or for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any  # noqa: TID251  # a function of another package

import jax

from attn_dispatch.integrations.tally import State, Tally

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
        self._since = self._until = State(0, 0)
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
