"""What a check allows to run attention, and what to do about what else would run it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attn_dispatch.core import select
from attn_dispatch.core.verdict import Verdict, chosen
from attn_dispatch.implementation import Device


@dataclass(frozen=True)
class Allowed:
    """The implementations that may run a program's attention."""

    names: tuple[str, ...] = ()
    """Their names; () allows every vendor's kernel."""

    def __str__(self) -> str:
        return " or ".join(self.names) if self.names else "a kernel"

    def runs(self, verdicts: Sequence[Verdict]) -> bool:
        """Whether something allowed is known to run a direction.

        XLA may be named for calls that were to run on it. A fallback is not allowed by that.
        """
        found = chosen(verdicts)
        if found is None or found.is_unknown or found.is_fallback:
            return False
        names = {found.implementation, found.may_fall_back_to} - {""}
        return names <= {*self.names} if self.names else all(map(_is_kernel, names))

    def to_show(self, verdicts: Sequence[Verdict], device: Device) -> list[Verdict]:
        """What runs a direction; if that is not allowed, then what might, or why it cannot."""
        first = chosen(verdicts)
        found = [] if first is None else [first]
        if self.runs(verdicts):
            return found
        return found + [x for x in verdicts if x is not first and self._might_run(x, device)]

    def _might_run(self, verdict: Verdict, device: Device) -> bool:
        name = verdict.implementation
        if name in self.names:
            return True
        is_slower = verdict.is_eligible and _is_kernel(name) and not self.names
        is_expected = select.is_expected(select.named(name), device)
        return is_expected and (is_slower or not verdict.is_eligible)


KERNELS = Allowed()


def why(verdicts: Sequence[Verdict], basis: str, *, is_named: bool) -> str:
    """Why something runs a direction although no kernel refused it: the call names it, or XLA is
    faster. "" for everything else.

    Args:
      verdicts: those of the direction.
      basis: what the order of implementations follows.
      is_named: whether the call names its implementations.
    """
    found = chosen(verdicts)
    if found is None or found.is_unknown:
        return ""
    if is_named:
        return "the call asks for it"
    if not _is_by_choice(found) or found.tuned is not None:
        return ""
    slower = [x.implementation for x in verdicts if x.predicted is not None and x is not found]
    return f"faster than {', '.join(slower)} {basis}" if slower and basis else ""


def remedies(wrong: Iterable[Sequence[Verdict]]) -> list[str]:
    """What to do about directions that are not allowed, beside the remedies of reasons."""
    found = [x for x in map(chosen, wrong) if x is not None]
    return [
        text
        for text, applies in (
            (_OF_A_CHOICE, any(map(_is_by_choice, found))),
            (_AT_RUN_TIME, any(x.may_fall_back_to for x in found)),
        )
        if applies
    ]


_OF_A_CHOICE = (
    'where XLA was chosen: if it may be, name "xla" among the implementations of this check; if '
    "not, name a kernel in the call (implementation=...), or run the program, and this check, "
    'under fallback("error"), where XLA replaces no kernel'
)
_AT_RUN_TIME = (
    "where a call may be left to XLA when the program runs: do as the remedies above say, or run "
    'the program, and this check, under fallback("error"), where no call may be left to XLA'
)


def _is_by_choice(verdict: Verdict | None) -> bool:
    """Whether XLA runs the call, and not as a fallback."""
    return verdict is not None and not (
        verdict.is_unknown or verdict.is_fallback or _is_kernel(verdict.implementation)
    )


def _is_kernel(name: str) -> bool:
    return select.named(name).PLATFORM is not None
