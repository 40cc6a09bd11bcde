"""The choice of an implementation: all in order of preference, with all reasons against each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from attn_dispatch import aiter, cudnn, fa4, flash, settings, xla
from attn_dispatch._version import __version__
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import call_warnings
from attn_dispatch.core.call_warnings import Refusals
from attn_dispatch.core.eligibility import (
    mask_chain,
    reasons_and_chain,
    reasons_as_it_is,
    scratch_bytes,
)
from attn_dispatch.core.faster_extras import faster_first
from attn_dispatch.core.rewrites import Chain, Compute
from attn_dispatch.core.rewrites.rewrite import changed, for_
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.extra import installed
from attn_dispatch.devices.implementation import Implementation, Plan
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason
from attn_dispatch.warning import AttentionFallbackWarning, warn_once

IMPLEMENTATIONS: tuple[Implementation, ...] = (cudnn, flash, fa4, aiter, xla)
"""The order in which they are asked without measurements; the last one runs everywhere."""


def implementations() -> tuple[Implementation, ...]:
    """This package's implementations and, before the last of them, those of other packages."""
    ours = {x.NAME for x in IMPLEMENTATIONS}
    extras = (x for x in installed() if x.NAME not in ours)
    return (*IMPLEMENTATIONS[:-1], *extras, IMPLEMENTATIONS[-1])


@dataclass(frozen=True)
class Verdict:
    """Whether one implementation can run one call."""

    implementation: str
    reasons: tuple[Reason, ...]
    """All reasons against it; empty means eligible."""
    plan: Plan | None
    """How it would run, if eligible."""
    rewrites: tuple[str, ...] = ()
    """The names of the rewrites by which the call reaches the kernel; see core/rewrites."""
    reasons_as_it_is: tuple[Reason, ...] = ()
    """If it runs rewritten: the reasons against the call as it is."""
    tuned: Winner | None = None
    """The tuning result, if the implementation is chosen because of it."""
    scratch_bytes: int = 0
    """Memory that the call takes beside its operands and results."""
    limit: str = ""
    """What the limit on scratch memory did, if anything."""

    @property
    def is_eligible(self) -> bool:
        return not self.reasons


def names() -> tuple[str, ...]:
    """The names that `implementation=` accepts."""
    return tuple(implementation.NAME for implementation in implementations())


def named(name: str) -> Implementation:
    """The implementation of this name, one of `names`."""
    return next(x for x in implementations() if x.NAME == name)


def verdicts(call: AttentionSpec, device: Device) -> tuple[Verdict, ...]:
    """The verdict of every implementation on this call, in order of preference."""
    result: list[Verdict] = []
    for implementation, spec in _asked_in_order(call, device):
        reasons, chain = reasons_and_chain(implementation, spec, device)
        if reasons:
            result.append(Verdict(implementation.NAME, reasons, None))
            continue
        plan = implementation.plan(chain.spec, device)
        as_it_is = reasons_as_it_is(implementation, spec, device) if chain.names else ()
        is_chosen = not any(verdict.is_eligible for verdict in result)
        mask_source = _mask_source(implementation, spec, device) if is_chosen else None
        names = chain.names if mask_source is None else (_under_mask_of(mask_source),)
        tuned = winner(call, device) if spec is not call else None
        scratch = scratch_bytes(implementation, chain, device)
        verdict = Verdict(implementation.NAME, (), plan, names, as_it_is, tuned, scratch)
        result.append(replace(verdict, limit=chain.limit))
    return tuple(result)


@dataclass(frozen=True)
class Choice:
    """An implementation for one call, and the rewrites by which it runs the call."""

    implementation: Implementation
    chain: Chain
    mask_source: Choice | None = None
    """If another implementation draws the dropout mask: its forward call that returns the mask."""

    @property
    def NAME(self) -> str:
        return self.implementation.NAME

    def compute(self, device: Device, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The results of the call, in order."""
        if self.mask_source is not None:
            keep = self.mask_source.compute(device, operands)[-1]
            without = ("dropout_key", "dropout_start")
            spec = changed(self.chain.spec, without=without, arrays={"keep": (keep.shape, "bool")})
            return xla.backward(spec, device, for_(spec, {**operands, "keep": keep}))

        def by(implementation: Implementation) -> Compute:
            def compute(
                spec: AttentionSpec, operands: Mapping[str, jax.Array]
            ) -> dict[str, jax.Array]:
                run = implementation.backward if spec.is_backward else implementation.forward
                return dict(zip(spec.result_names, run(spec, device, operands), strict=True))

            return compute

        return self.chain.compute(dict(operands), by(self.implementation), by(IMPLEMENTATIONS[-1]))


def choose(spec: AttentionSpec, device: Device) -> Choice:
    """The first implementation in order of preference that can run this call.

    If the caller left the choice open and no vendor's kernel runs the call on a GPU, the fallback
    policy (`attn_dispatch.fallback`) decides between a warning, an error and silence.

    Raises:
      NotImplementedError: with every reason, if none can, or if the policy is "error".
    """
    found = _first_eligible(spec, device)
    choice, refused = found.choice, found.refused
    if choice is None:
        raise NotImplementedError(
            _message("no implementation can run this attention call", spec, device, refused)
        )
    if not spec.meaning.implementation:
        if choice.implementation.PLATFORM is None and found.was_expected:
            _warn_of_fallback(spec, device, choice, refused)
        elif choice.chain.may_fall_back:
            why = reasons_as_it_is(choice.implementation, spec, device)
            _warn_of_fallback(spec, device, choice, {choice.NAME: why})
    return choice


def winner(spec: AttentionSpec, device: Device) -> Winner | None:
    """The fastest way that tuning found for the call, if one is known and it can run here."""
    found = winners.find(spec, device, versions)
    if found is None or found.implementation not in (spec.meaning.implementation or names()):
        return None
    if settings.current().fallback == "error" and named(found.implementation).PLATFORM is None:
        return None
    return found if by_engine(spec, device, found.implementation, found.engine) else None


def candidates(spec: AttentionSpec, device: Device) -> list[Choice]:
    """Candidates for tuning, the default first. If the caller named implementations, only the
    default."""
    choices: list[Choice] = []
    for implementation in _preferred(spec, device):
        if implementation.PLATFORM in (None, device.platform):
            choice = by_engine(spec, device, implementation.NAME, "")
            choices += [choice] if choice else []
    return choices[:1] if spec.meaning.implementation else choices


def by_engine(spec: AttentionSpec, device: Device, name: str, engine: str) -> Choice | None:
    """The call by this engine of an implementation; None if the engine cannot run it."""
    implementation = named(name)
    reasons, chain = reasons_and_chain(implementation, _with_engine(spec, engine), device)
    return None if reasons else Choice(implementation, chain)


def versions(device: Device) -> dict[str, str]:
    """The versions of this package and of the libraries that decide the choice for a device."""
    found = (x.version() for x in implementations() if x.PLATFORM == device.platform)
    return {"attn_dispatch": __version__, **dict(version for version in found if version)}


def plan(spec: AttentionSpec, device: Device) -> None:
    """Plan the call by the implementation that `choose` would choose, without a warning."""
    _first_eligible(spec, device)


@dataclass(frozen=True)
class _Found:
    choice: Choice | None
    refused: dict[str, tuple[Reason, ...]]
    """The reasons of the implementations asked before the chosen one."""
    was_expected: bool
    """Whether one of those was expected to run the call."""


def _first_eligible(call: AttentionSpec, device: Device) -> _Found:
    """The first implementation in order of preference that can run this call."""
    refused: dict[str, tuple[Reason, ...]] = {}
    is_open, was_expected = not call.options.meaning.implementation, False
    for implementation, spec in _asked_in_order(call, device):
        if is_open and implementation.PLATFORM not in (None, device.platform):
            continue  # another vendor's: nobody expects it here
        if is_open and _is_absent_extra(implementation, device):
            continue
        reasons, chain = reasons_and_chain(implementation, spec, device)
        if not reasons:
            mask_source = _mask_source(implementation, spec, device)
            return _Found(Choice(implementation, chain, mask_source), refused, was_expected)
        refused[implementation.NAME] = reasons
        was_expected |= not implementation.IS_EXTRA
    return _Found(None, refused, was_expected)


def formula(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """out and lse of a forward call in plain JAX, which JAX can differentiate.

    Raises:
      NotImplementedError: with every reason, if there are no formulas for this call.
    """
    if reasons := xla.not_supported_reasons(spec, CPU):
        headline = "this attention call has no formulas to differentiate"
        raise NotImplementedError(_message(headline, spec, CPU, {xla.NAME: reasons}))
    return xla.formula(spec, operands)


def allow_formula(spec: AttentionSpec, device: Device) -> None:
    """Warn or raise, as `choose` does, where formulas compute a derivative of this call.

    Args:
      spec: the forward call, whose options name the derivative.
      device: the device that the call is lowered for.

    Raises:
      NotImplementedError: if another implementation was asked for, if it draws the dropout mask, or
        if the policy is "error".
    """
    if spec.meaning.dropout_rate:
        drawn_by = choose(spec.returning(replace(spec.wanted, derivative=None)), device)
        spec = spec.by(drawn_by.NAME)
    choose(spec, device)


def _mask_source(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> Choice | None:
    """The choice that draws the dropout mask of a backward call by this implementation.

    None if the implementation draws it, or if there is no mask.
    """
    if implementation is not xla or spec.partner is None or not spec.is_backward:
        return None
    for earlier in _preferred(spec, device):
        if earlier is implementation:
            return None
        if (
            earlier.PLATFORM == device.platform
            and not reasons_and_chain(earlier, spec.partner, device)[0]
        ):
            chain = mask_chain(earlier, spec.partner, device)
            return None if chain is None else Choice(earlier, chain)
    return None


def _under_mask_of(mask_source: Choice) -> str:
    return (
        f"under the dropout mask of {mask_source.NAME}, whose forward pass runs again to return "
        "it: one byte for each pair of a query and a key"
    )


def _is_absent_extra(implementation: Implementation, device: Device) -> bool:
    """Whether the implementation is an extra that cannot be used here, which nobody expects."""
    return implementation.IS_EXTRA and bool(implementation.unusable_reason(device))


def _asked_in_order(
    spec: AttentionSpec, device: Device
) -> list[tuple[Implementation, AttentionSpec]]:
    """Each implementation with the call that it is asked about, a tuned winner first."""
    preferred = _preferred(spec, device)
    if (found := winner(spec, device)) is None:
        return [(x, spec) for x in preferred]
    first = named(found.implementation)
    others = [(x, spec) for x in preferred if x is not first]
    return [(first, _with_engine(spec, found.engine)), *others]


def _with_engine(spec: AttentionSpec, engine: str) -> AttentionSpec:
    return replace(spec, options=replace(spec.options, engine=engine))


def _preferred(spec: AttentionSpec, device: Device) -> Sequence[Implementation]:
    wanted = spec.meaning.implementation
    if not wanted:
        return faster_first(implementations(), spec, device)
    by_name = {implementation.NAME: implementation for implementation in implementations()}
    return [by_name[name] for name in wanted]


def _warn_of_fallback(
    spec: AttentionSpec, device: Device, choice: Choice, refused: Refusals
) -> None:
    """Warn that a call falls back, and its backward pass too if that follows; or raise."""
    policy = settings.current().fallback
    if policy == "silent" or (policy == "warn" and call_warnings.were_given(spec, device, refused)):
        return
    chosen = IMPLEMENTATIONS[-1].NAME if choice.chain.may_fall_back else choice.NAME
    what, remedy = "attention", f'implementation="{chosen}" asks for it without a warning'
    if spec.is_backward:
        what = "attention's backward pass"
    if spec.wanted.derivative is not None:
        what = f"attention's {spec.wanted.derivative}"
    if spec.is_backward or spec.wanted.derivative is not None:
        remedy += ", and for the call as well"
    headline = f"{what} falls back to {chosen}"
    if choice.chain.may_fall_back:
        headline = f"{what} may fall back to {chosen}, which is decided when it runs"
    if choice.mask_source is not None:
        headline += f", {_under_mask_of(choice.mask_source)}"
    message = _message(headline, spec, device, refused)
    backward = _backward_refusals(spec, device)
    if any(backward.values()):
        message += "\n  and so does its backward pass"
        message += _reasons_text({x: y for x, y in backward.items() if y}, known=refused)
    if policy == "error":
        raise NotImplementedError(message)
    call_warnings.mark_given(spec, device, refused, backward)
    warn_once(
        f"{message}\n  {remedy}", AttentionFallbackWarning, call_warnings.line_of(spec.options)
    )


def _backward_refusals(spec: AttentionSpec, device: Device) -> Refusals:
    """The reasons against the backward pass of a forward call that will have one."""
    backward = spec.expected_backward()
    if backward is None:
        return {}
    found: dict[str, tuple[Reason, ...]] = {}
    for implementation in implementations():
        if implementation.PLATFORM == device.platform and not _is_absent_extra(
            implementation, device
        ):
            found[implementation.NAME], _ = reasons_and_chain(implementation, backward, device)
            if not found[implementation.NAME]:
                return {}
    return found


def _message(headline: str, spec: AttentionSpec, device: Device, refused: Refusals) -> str:
    return f"{headline}\n  call: {spec}\n  device: {device}" + _reasons_text(refused)


def _reasons_text(refused: Refusals, known: Refusals | None = None) -> str:
    """A line for each reason that is not in `known`."""
    lines: list[str] = []
    for name, reasons in refused.items():
        given = (known or {}).get(name, ())
        lines.append(f"\n  {name}:")
        lines += [f"\n    - {reason.with_remedy}" for reason in reasons if reason not in given]
        if given and not set(reasons) - set(given):
            lines.append(" for the same reasons")
    return "".join(lines)
