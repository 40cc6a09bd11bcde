"""Choosing who computes a call: implementations in order, and all reasons against each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from attn_dispatch import aiter, cudnn, fa4, flash, settings, xla
from attn_dispatch._version import __version__
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import told
from attn_dispatch.core.consider import (
    FORMULAS,
    GOES_BACK,
    consider,
    mask_of,
    reasons_as_it_is,
    scratch_bytes,
)
from attn_dispatch.core.preferences import in_order
from attn_dispatch.core.rewrites import Chain, Compute
from attn_dispatch.core.rewrites.rewrite import changed, for_
from attn_dispatch.core.told import Refusals
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.extra import installed
from attn_dispatch.devices.implementation import Implementation, Plan
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason
from attn_dispatch.warning import AttentionFallbackWarning, warn_once

IMPLEMENTATIONS: tuple[Implementation, ...] = (cudnn, flash, fa4, aiter, xla)
"""As they are asked where nothing was measured; the last one runs everywhere."""


def implementations() -> tuple[Implementation, ...]:
    """Those, and before the last one what other packages bring."""
    ours = {x.NAME for x in IMPLEMENTATIONS}
    extras = (x for x in installed() if x.NAME not in ours)
    return (*IMPLEMENTATIONS[:-1], *extras, IMPLEMENTATIONS[-1])


@dataclass(frozen=True)
class Verdict:
    """Whether one implementation can run one call."""

    implementation: str
    reasons: tuple[Reason, ...]
    """Everything that speaks against it; empty means eligible."""
    plan: Plan | None
    """How it would run, if eligible."""
    rewrites: tuple[str, ...] = ()
    """What is done to the call before the kernel runs it; see core/rewrites."""
    reasons_as_it_is: tuple[Reason, ...] = ()
    """What speaks against the call as it is, where it runs rewritten."""
    tuned: Winner | None = None
    """What tuning found, where that is why it is chosen."""
    scratch_bytes: int = 0
    """Memory that the call takes beside its operands and results, as it runs."""
    limit: str = ""
    """What the limit on scratch memory did, if anything."""

    @property
    def is_eligible(self) -> bool:
        return not self.reasons


def names() -> tuple[str, ...]:
    """What `implementation=` accepts."""
    return tuple(implementation.NAME for implementation in implementations())


def named(name: str) -> Implementation:
    """The implementation of this name, one of `names`."""
    return next(x for x in implementations() if x.NAME == name)


def verdicts(call: AttentionSpec, device: Device) -> tuple[Verdict, ...]:
    """The verdict of every implementation on this call, in order of preference."""
    result: list[Verdict] = []
    for implementation, spec in _in_turn(call, device):
        reasons, chain = consider(implementation, spec, device)
        if reasons:
            result.append(Verdict(implementation.NAME, reasons, None))
            continue
        plan = implementation.plan(chain.spec, device)
        as_it_is = reasons_as_it_is(implementation, spec, device) if chain.names else ()
        is_chosen = not any(verdict.is_eligible for verdict in result)
        drawer = _drawer(implementation, spec, device) if is_chosen else None
        names = chain.names if drawer is None else (_under_mask_of(drawer),)
        tuned = winner(call, device) if spec is not call else None
        scratch = scratch_bytes(implementation, chain, device)
        verdict = Verdict(implementation.NAME, (), plan, names, as_it_is, tuned, scratch)
        result.append(replace(verdict, limit=chain.limit))
    return tuple(result)


@dataclass(frozen=True)
class Choice:
    """An implementation for one call, by way of the rewrites that it takes."""

    implementation: Implementation
    chain: Chain
    drawer: Choice | None = None
    """Who draws the dropout mask, if another does: the forward call that has it as a result."""

    @property
    def NAME(self) -> str:
        return self.implementation.NAME

    def compute(self, device: Device, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The results of the call that was chosen for, in order."""
        if self.drawer is not None:
            keep = self.drawer.compute(device, operands)[-1]
            without = ("dropout_key", "dropout_start")
            spec = changed(self.chain.spec, without=without, arrays={"keep": (keep.shape, "bool")})
            return GOES_BACK.backward(spec, device, for_(spec, {**operands, "keep": keep}))

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

    Where the caller left the choice open and it falls away from the vendor's kernel on a GPU, the
    fallback policy (`attn_dispatch.fallback`) says so.

    Raises:
      NotImplementedError: with every reason, if none can, or if the policy is "error".
    """
    found = _first_able(spec, device)
    choice, refused = found.choice, found.refused
    if choice is None:
        raise NotImplementedError(
            _message("no implementation can run this attention call", spec, device, refused)
        )
    if not spec.meaning.implementation:
        if choice.implementation.PLATFORM is None and found.is_missed:
            _announce_fallback(spec, device, choice, refused)
        elif choice.chain.may_fall_back:
            why = reasons_as_it_is(choice.implementation, spec, device)
            _announce_fallback(spec, device, choice, {choice.NAME: why})
    return choice


def winner(spec: AttentionSpec, device: Device) -> Winner | None:
    """What tuning found to be the fastest for the call, if it is known and runs it here."""
    found = winners.find(spec, device, versions)
    if found is None or found.implementation not in (spec.meaning.implementation or names()):
        return None
    if settings.current().fallback == "error" and named(found.implementation).PLATFORM is None:
        return None
    return found if by_engine(spec, device, found.implementation, found.engine) else None


def able(spec: AttentionSpec, device: Device) -> list[Choice]:
    """Everything among which tuning may choose, what is chosen without it first: of a list of the
    caller's what is chosen alone."""
    choices: list[Choice] = []
    for implementation in _preferred(spec, device):
        if implementation.PLATFORM in (None, device.platform):
            choice = by_engine(spec, device, implementation.NAME, "")
            choices += [choice] if choice else []
    return choices[:1] if spec.meaning.implementation else choices


def by_engine(spec: AttentionSpec, device: Device, name: str, engine: str) -> Choice | None:
    """The call by this engine of an implementation, None if that cannot run it."""
    implementation = named(name)
    reasons, chain = consider(implementation, _with_engine(spec, engine), device)
    return None if reasons else Choice(implementation, chain)


def versions(device: Device) -> dict[str, str]:
    """This package's and those of the libraries that have a part in the choice for a device."""
    found = (x.version() for x in implementations() if x.PLATFORM == device.platform)
    return {"attn_dispatch": __version__, **dict(version for version in found if version)}


def plan(spec: AttentionSpec, device: Device) -> None:
    """Have whatever `choose` would choose plan the call, and say nothing about it."""
    _first_able(spec, device)


@dataclass(frozen=True)
class _Found:
    choice: Choice | None
    refused: dict[str, tuple[Reason, ...]]
    """Reasons of those that were asked before."""
    is_missed: bool
    """Whether one of them was expected to run it."""


def _first_able(call: AttentionSpec, device: Device) -> _Found:
    """The first implementation in order of preference that can run this call."""
    refused: dict[str, tuple[Reason, ...]] = {}
    is_open, is_missed = not call.options.meaning.implementation, False
    for implementation, spec in _in_turn(call, device):
        if is_open and implementation.PLATFORM not in (None, device.platform):
            continue  # the other vendor's: nobody expected it here
        if is_open and _is_not_missed(implementation, device):
            continue
        reasons, chain = consider(implementation, spec, device)
        if not reasons:
            drawer = _drawer(implementation, spec, device)
            return _Found(Choice(implementation, chain, drawer), refused, is_missed)
        refused[implementation.NAME] = reasons
        is_missed |= not implementation.IS_EXTRA
    return _Found(None, refused, is_missed)


def formula(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """out and lse of a forward call in plain JAX, which JAX can differentiate.

    Raises:
      NotImplementedError: with every reason, if there are no formulas for this call.
    """
    if reasons := FORMULAS.not_supported_reasons(spec, CPU):
        headline = "this attention call has no formulas to differentiate"
        raise NotImplementedError(_message(headline, spec, CPU, {FORMULAS.NAME: reasons}))
    return FORMULAS.formula(spec, operands)


def allow_formula(spec: AttentionSpec, device: Device) -> None:
    """Raise, or say, what `choose` does, where a derivative of this call comes from formulas.

    Args:
      spec: the forward call, its options saying which derivative is wanted.
      device: what is lowered for.

    Raises:
      NotImplementedError: if another implementation was asked for, if it draws the dropout mask, or
        if the policy is "error".
    """
    if spec.meaning.dropout_rate:
        drawn_by = choose(spec.returning(replace(spec.wanted, derivative=None)), device)
        spec = spec.by(drawn_by.NAME)
    choose(spec, device)


def _drawer(implementation: Implementation, spec: AttentionSpec, device: Device) -> Choice | None:
    """Who draws the dropout mask of a backward call that this implementation was chosen for.

    None: it does, or there is no mask.
    """
    if implementation is not GOES_BACK or spec.partner is None or not spec.is_backward:
        return None
    for earlier in _preferred(spec, device):
        if earlier is implementation:
            return None
        if earlier.PLATFORM == device.platform and not consider(earlier, spec.partner, device)[0]:
            chain = mask_of(earlier, spec.partner, device)
            return None if chain is None else Choice(earlier, chain)
    return None


def _under_mask_of(drawer: Choice) -> str:
    return (
        f"under the dropout mask of {drawer.NAME}, whose forward pass runs again to tell it: "
        "one byte for each pair of a query and a key"
    )


def _is_not_missed(implementation: Implementation, device: Device) -> bool:
    """Whether it is an extra that is not installed, or of no use here: nobody expected it."""
    return implementation.IS_EXTRA and bool(implementation.unusable_reason(device))


def _in_turn(spec: AttentionSpec, device: Device) -> list[tuple[Implementation, AttentionSpec]]:
    """Who is asked, in order of preference, and about which call: what tuning found comes first."""
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
        return in_order(implementations(), spec, device)
    by_name = {implementation.NAME: implementation for implementation in implementations()}
    return [by_name[name] for name in wanted]


def _announce_fallback(
    spec: AttentionSpec, device: Device, choice: Choice, refused: Refusals
) -> None:
    """Say that a call falls back, and its backward pass with it where that follows."""
    policy = settings.current().fallback
    if policy == "silent" or (policy == "warn" and told.has_been(spec, device, refused)):
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
    if choice.drawer is not None:
        headline += f", {_under_mask_of(choice.drawer)}"
    message = _message(headline, spec, device, refused)
    backward = _backward_refusals(spec, device)
    if any(backward.values()):
        message += "\n  and so does its backward pass"
        message += _reasons_text({x: y for x, y in backward.items() if y}, but=refused)
    if policy == "error":
        raise NotImplementedError(message)
    told.remember(spec, device, refused, backward)
    warn_once(f"{message}\n  {remedy}", AttentionFallbackWarning, told.line_of(spec.options))


def _backward_refusals(spec: AttentionSpec, device: Device) -> Refusals:
    """What speaks against the backward pass of a forward call that will have one."""
    backward = spec.expected_backward()
    if backward is None:
        return {}
    found: dict[str, tuple[Reason, ...]] = {}
    for implementation in implementations():
        if implementation.PLATFORM == device.platform and not _is_not_missed(
            implementation, device
        ):
            found[implementation.NAME], _ = consider(implementation, backward, device)
            if not found[implementation.NAME]:
                return {}
    return found


def _message(headline: str, spec: AttentionSpec, device: Device, refused: Refusals) -> str:
    return f"{headline}\n  call: {spec}\n  device: {device}" + _reasons_text(refused)


def _reasons_text(refused: Refusals, but: Refusals | None = None) -> str:
    """A line for each reason, `but` those that have been given."""
    lines: list[str] = []
    for name, reasons in refused.items():
        given = (but or {}).get(name, ())
        lines.append(f"\n  {name}:")
        lines += [f"\n    - {reason.with_remedy}" for reason in reasons if reason not in given]
        if given and not set(reasons) - set(given):
            lines.append(" for the same reasons")
    return "".join(lines)
