"""How often an operation runs in one run of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Branch:
    """A branch of a `cond`."""

    choice: object
    """The `cond`, where the walk met it."""
    index: int
    number: int
    """How many branches the `cond` has."""


@dataclass(frozen=True)
class Runs:
    """How often something runs in one run of the program, on one device."""

    times: int | None = 1
    """The number of times; None if it is known only when the program runs, as in a `while`."""
    is_conditional: bool = False
    """True if it may run less often, because of a `cond`."""
    again: int = 0
    """How many of these times recompute a forward pass under `jax.checkpoint`."""
    branches: tuple[Branch, ...] = ()
    """During the walk: the branches that it is in, outermost first. `total` resolves them."""

    def __str__(self) -> str:
        if self.times is None:
            return "unknown, in a while loop"
        text = f"at most {self.times}, in a branch" if self.is_conditional else str(self.times)
        return f"{text} ({self.again} of them again under jax.checkpoint)" if self.again else text

    def repeated(self, times: int | None) -> Runs:
        """How often something runs that runs `times` times in each of these runs."""
        if self.times is None or times is None:
            return replace(self, times=None, again=0)
        return replace(self, times=self.times * times, again=self.again * times)

    def recomputed(self) -> Runs:
        """These runs, if all of them recompute a forward pass."""
        return replace(self, again=self.times or 0)

    def in_branch(self, branch: Branch) -> Runs:
        """These runs, in a branch of a `cond`."""
        return replace(self, branches=(*self.branches, branch))


def total(found: Iterable[Runs]) -> Runs:
    """How often something runs in all: the sum, in which a `cond` counts with its largest branch.

    Args:
      found: the runs at each place in the program.
    """
    parts: list[Runs] = []
    choices: dict[object, dict[Branch, list[Runs]]] = {}
    for runs in found:
        if runs.branches:
            first, *rest = runs.branches
            inside = choices.setdefault(first.choice, {}).setdefault(first, [])
            inside.append(replace(runs, branches=tuple(rest)))
        else:
            parts.append(runs)
    for branches in choices.values():
        first = next(iter(branches))
        parts.append(_of_a_cond([total(x) for x in branches.values()], first.number))
    times = [x.times for x in parts if x.times is not None]
    is_conditional = any(x.is_conditional for x in parts)
    if len(times) < len(parts):
        return Runs(None, is_conditional)
    return Runs(sum(times), is_conditional, sum(x.again for x in parts))


def _of_a_cond(branches: Sequence[Runs], number: int) -> Runs:
    """The most that a branch has, or what all have. Branches without any runs are left out."""
    most = max(branches, key=lambda x: (x.times is None, x.times or 0, x.again))
    is_the_same = len(branches) == number and all(x == most for x in branches)
    return most if is_the_same else replace(most, is_conditional=True)
