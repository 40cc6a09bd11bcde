"""What a program's attention calls run, as data that prints as a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch.core.device_share import DeviceShare
from attn_dispatch.core.explanation import Explanation, planner_lines, verdict_lines
from attn_dispatch.core.verdict import Verdict
from attn_dispatch.implementation import Device
from attn_dispatch.text import counted, wrapped
from attn_dispatch.whole_programs.allowed import KERNELS, Allowed, remedies, why
from attn_dispatch.whole_programs.other_attention import OtherAttention
from attn_dispatch.whole_programs.places import Place
from attn_dispatch.whole_programs.runs import Runs

_WIDTH = 100
_NO_BACKWARD = "none in the program, although it differentiates attention"


@dataclass(frozen=True)
class ProgramCall:
    """An attention call of a program."""

    place: Place | None
    """The line that makes the call; None if JAX did not keep it."""
    forward_runs: Runs
    """How often the forward pass runs: 0 if the program has only the backward pass."""
    backward_runs: Runs
    explanation: Explanation
    """What `attn_dispatch.explain` returns for the part that one device computes, without verdicts
    on a direction that does not run."""

    def __repr__(self) -> str:
        names = (self.explanation.chosen_forward, self.explanation.chosen_backward)
        runs = (self.forward_runs, self.backward_runs)
        each = zip(self._directions, runs, names, strict=True)
        by = [f"{x} {times} by {name}" for (x, found), times, name in each if found]
        return f"<ProgramCall {_text_of(self.place)}: {', '.join(by)}>"

    @property
    def share(self) -> DeviceShare | None:
        """On a mesh: which part of the program's call one device computes."""
        return self.explanation.share

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The directions, of "forward" and "backward", that no vendor's kernel is known to run,
        whether kernels refuse the call, may leave it to XLA when it runs, or are slower."""
        return tuple(self.not_by(KERNELS))

    def not_by(self, allowed: Allowed) -> dict[str, tuple[Verdict, ...]]:
        """The directions that nothing allowed is known to run, with their verdicts."""
        return {x: found for x, found in self._directions if found and not allowed.runs(found)}

    @property
    def _directions(self) -> tuple[tuple[str, tuple[Verdict, ...]], ...]:
        return ("forward", self.explanation.forward), ("backward", self.explanation.backward)

    def lines(self, width: int, *, codes: bool, allowed: Allowed = KERNELS) -> list[str]:
        """The lines about this call in the list, with reasons where nothing allowed runs it."""
        directions = (
            (self.explanation.call.wanted.derivative or "forward", self.forward_runs),
            ("backward", self.backward_runs),
        )
        runs = [
            f"{direction} {times}"
            for (direction, times), (_, verdicts) in zip(directions, self._directions, strict=True)
            if verdicts or times != Runs(0)  # a scan may have no steps
        ]
        lines = wrapped("line      ", _text_of(self.place), width)
        lines += wrapped("call      ", str(self.explanation.call), width)
        lines += [] if self.share is None else wrapped("share     ", str(self.share), width)
        lines += wrapped("runs      ", "; ".join(runs), width)
        found = self.explanation
        is_named = bool(found.call.meaning.implementation)
        for direction, verdicts in self._directions:
            is_allowed, label = allowed.runs(verdicts), f"{direction:<9} "
            because = "" if is_allowed else why(verdicts, found.basis, is_named=is_named)
            for i, verdict in enumerate(allowed.to_show(verdicts, found.device)):
                how, reason = ("could run", "") if i else ("runs", because)
                lines += verdict_lines(label, verdict, width, codes=codes, how=how, why=reason)
        return lines


@dataclass(frozen=True)
class ProgramExplanation:
    """The result of `attn_dispatch.explain_program`; `str()` of it is a list."""

    name: str
    """The program's."""
    device: Device
    calls: tuple[ProgramCall, ...]
    """The calls of attn_dispatch, in the order of the program."""
    others: tuple[OtherAttention, ...]
    """Attention that is no call of attn_dispatch: matrix products, `jax.nn`, another's kernel."""
    drops_backward: bool = False
    """Whether the function has backward passes of attention that JAX leaves out of the program,
    because nothing that it returns depends on them."""

    @property
    def fallbacks(self) -> tuple[ProgramCall, ...]:
        """The calls of which a direction is not known to be run by a vendor's kernel."""
        return tuple(x for x in self.calls if x.fallbacks)

    @property
    def lacks_backward(self) -> bool:
        """Whether the function differentiates attention, but its program has no backward pass."""
        wanted = [x.explanation.call.wanted for x in self.calls]
        has_derivative = any(x.derivative for x in wanted)
        has_derivative |= any(x.explanation.backward for x in self.calls)
        is_differentiated = self.drops_backward or any(x.differentiated for x in wanted)
        return is_differentiated and not has_derivative

    def not_by(self, allowed: Allowed, width: int = _WIDTH) -> str:
        """The part of the list that nothing allowed runs, with remedies; "" if there is none."""
        wrong = [(x, found) for x in self.calls if (found := x.not_by(allowed))]
        if self.calls and not wrong and not self.others:
            return ""
        number = f", {len(wrong)} of them without {allowed}" if len(wrong) < len(self.calls) else ""
        calls = [x for x, _ in wrong]
        text = self._text(self._number_of_calls + number, calls, width, allowed, codes=False)
        lines = [""]
        for remedy in remedies(x for _, found in wrong for x in found.values()):
            lines += wrapped("remedy    ", remedy, width)
        return text + "\n".join(["", *lines] if lines[1:] else [])

    def __repr__(self) -> str:
        counts = f"{self._number_of_calls}, {counted(len(self.fallbacks), 'fallback')}"
        return f"<ProgramExplanation {self.name}: {counts}, {self.device.name}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH, *, codes: bool = True) -> str:
        """The list, in lines of at most `width` columns as far as words allow.

        With `codes`, it names cuDNN's engines, such as eng9_k24=1.
        """
        return self._text(self._number_of_calls, self.calls, width, KERNELS, codes=codes)

    @property
    def _number_of_calls(self) -> str:
        number = counted(len(self.calls), "attention call") if self.calls else "no attention call"
        return f"{number} of attn_dispatch"

    def _text(
        self,
        number: str,
        calls: Sequence[ProgramCall],
        width: int,
        allowed: Allowed,
        *,
        codes: bool,
    ) -> str:
        """The list of these calls, and of all attention that does not go through attn_dispatch."""
        lines = [
            *wrapped("program   ", f"{self.name}: {number}", width),
            *wrapped("device    ", f"{self.device.platform}: {self.device}", width),
        ]
        missing = (x.explanation.missing_planner for x in calls)
        lines += planner_lines(next((x for x in missing if x is not None), None), width)
        for call in calls:
            lines += ["", *call.lines(width, codes=codes, allowed=allowed)]
        if self.lacks_backward:
            lines += ["", *wrapped("backward  ", _NO_BACKWARD, width)]
        if self.others:
            number = counted(len(self.others), "attention")
            lines += ["", *wrapped("", f"not through attn_dispatch: {number}", width)]
            for other in self.others:
                lines += wrapped("  - ", str(other), width)
        return "\n".join(lines)


def _text_of(place: Place | None) -> str:
    return "unknown" if place is None else str(place)
