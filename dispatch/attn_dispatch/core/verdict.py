"""The verdict of every implementation on a call, for `explain`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.choice.time_model import Prediction
from attn_dispatch.core.eligibility import (
    plan_of,
    reasons_and_chain,
    reasons_as_it_is,
    scratch_bytes,
)
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.core.unplanned import is_unknown
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.reason import Reason
from attn_dispatch.text import counted


@dataclass(frozen=True)
class Verdict:
    """Whether and how one implementation runs one call."""

    implementation: str
    reasons: tuple[Reason, ...]
    """All reasons against the call; empty means eligible. If `is_unknown`, the only reason is that
    nothing here can plan the call."""
    plan: Plan | None
    """How the call would run, if eligible."""
    rewrites: tuple[str, ...] = ()
    """The names of the rewrites by which the call reaches the kernel; see core/rewrites."""
    reasons_as_it_is: tuple[Reason, ...] = ()
    """If the call runs rewritten: the reasons against the call as it is."""
    tuned: Winner | None = None
    """The tuning result, if the implementation is chosen because of it."""
    scratch_bytes: int = 0
    """Memory that the call takes beside its operands and results."""
    limit: str = ""
    """What the limit on scratch memory did, if anything."""
    predicted: Prediction | None = None
    """The time that the implementation is expected to take, if its rates are known."""

    is_fallback: bool = False
    """Whether kernels refuse the call, or may leave it to XLA when the program runs, so that the
    policy of `attn_dispatch.fallback` decides. Never if the call names implementations."""
    may_fall_back_to: str = ""
    """The implementation that computes the call instead if the program, when it runs, finds that
    this one cannot; "" if nothing does."""

    def __repr__(self) -> str:
        if self.is_unknown:
            how = "unknown"
        elif self.plan is None:
            how = f"cannot run, {counted(len(self.reasons), 'reason')}"
        else:
            how = f"runs{'' if self.predicted is None else f', {self.predicted}'}"
        return f"<Verdict {self.implementation}: {how}>"

    @property
    def is_eligible(self) -> bool:
        return not self.reasons

    @property
    def is_unknown(self) -> bool:
        """Whether only a planner that is not here can tell if the implementation runs the call."""
        return is_unknown(self.reasons)


def chosen(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The first verdict in order of preference that does not rule its implementation out."""
    return next((x for x in verdicts if x.is_eligible or x.is_unknown), None)


def verdicts_on(spec: AttentionSpec, device: Device) -> tuple[Verdict, ...]:
    """The verdict of every implementation on this call, in order of preference."""
    result: list[Verdict] = []
    is_open, vendor_refused = not spec.meaning.implementation, False
    ranked = select.ranked(spec, device)
    for implementation, asked in select.asked_in_order(spec, device):
        reasons, chain = reasons_and_chain(implementation, asked, device)
        if reasons:
            result.append(Verdict(implementation.NAME, reasons, None))
            is_expected = select.is_expected(implementation, device)
            vendor_refused |= is_expected and not implementation.IS_EXTRA
            continue
        plan = plan_of(implementation, chain, device)
        as_it_is = reasons_as_it_is(implementation, asked, device) if chain.names else ()
        is_chosen = not any(verdict.is_eligible for verdict in result)
        mask_source = select.mask_source_of(implementation, asked, device) if is_chosen else None
        names = chain.names if mask_source is None else (select.under_mask_of(mask_source),)
        tuned = select.winner(spec, device) if asked is not spec else None
        scratch = scratch_bytes(implementation, chain, device)
        verdict = Verdict(implementation.NAME, (), plan, names, as_it_is, tuned, scratch)
        found = ranked.predictions.get(implementation.NAME)
        verdict = replace(verdict, limit=chain.limit, predicted=found)
        last = select.IMPLEMENTATIONS[-1].NAME if chain.may_fall_back else ""
        is_refused = implementation.PLATFORM is None and vendor_refused
        is_fallback = is_open and (is_refused or chain.may_fall_back)
        result.append(replace(verdict, is_fallback=is_fallback, may_fall_back_to=last))
    return tuple(result)
