"""How much attention went through the patches of one kind, and what ran instead."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import NamedTuple, ParamSpec, TypeVar

import jax

from attn_dispatch.integrations.merging import text_of
from attn_dispatch.warning import caller, warn_of_convention

P = ParamSpec("P")
R = TypeVar("R")

_SCORES_DIMS = 3
"""The fewest dims of attention scores: heads, queries, keys."""
_MOST_SEEN = 3
"""How many of each kind a warning lists."""
_MAX_SOFTMAXES = 256


class State(NamedTuple):
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
    def state(self) -> State:
        return State(self._calls, len(self._softmaxes))

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

    def warn_if_unused(self, since: State, originals: Iterable[Callable[..., object]]) -> None:
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
