"""Which implementation runs a call: the first, in order of preference, that can.

This file alone knows all implementations and their order; besides, only eligibility.py knows XLA.
eligibility.py decides whether an implementation can run a call, core/rewrites/search.py by which
rewrites, choice/ which one comes first, and fallback.py the message if no kernel can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import jax

from attn_dispatch import aiter, cudnn, fa4, flash, settings, xla
from attn_dispatch._version import __version__
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import fallback
from attn_dispatch.core.choice.order import Ranking, ranking
from attn_dispatch.core.eligibility import mask_chain, reasons_and_chain, reasons_as_it_is
from attn_dispatch.core.mask_arrays import TakesMask
from attn_dispatch.core.rewrites import Chain, Compute
from attn_dispatch.core.rewrites.rewrite import changed, for_
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.from_packages import installed
from attn_dispatch.devices.implementation import Implementation, SkipsInvalidRows
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.tile_lists import TileSizes

IMPLEMENTATIONS: tuple[Implementation, ...] = (cudnn, flash, fa4, aiter, xla)
"""The order in which they are asked without measurements; the last one runs everywhere."""


def implementations() -> tuple[Implementation, ...]:
    """This package's implementations and, before the last of them, those of other packages."""
    if not (further := installed()):
        return IMPLEMENTATIONS
    ours = {x.NAME for x in IMPLEMENTATIONS}
    others = (x for x in further if x.NAME not in ours)
    return (*IMPLEMENTATIONS[:-1], *others, IMPLEMENTATIONS[-1])


def names() -> tuple[str, ...]:
    """The names that `implementation=` accepts."""
    return tuple([x.NAME for x in implementations()])


def named(name: str) -> Implementation:
    """The implementation of this name, one of `names`."""
    return next(x for x in implementations() if x.NAME == name)


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

    def skips_invalid_rows(self, device: Device) -> bool:
        """Whether invalid rows may have an lse of NaN, in the backward pass."""
        taker = cast("object", self.implementation)
        return (
            not self.chain.steps
            and self.mask_source is None
            and isinstance(taker, SkipsInvalidRows)
            and taker.skips_invalid_rows(self.chain.first, device)
        )

    def compute(
        self,
        device: Device,
        operands: Mapping[str, jax.Array],
        mask: MaskArrays | None = None,
    ) -> tuple[jax.Array, ...]:
        """The results of the call, in order.

        `mask` are the arrays of its mask, if they were made before. After a rewrite the call has
        another mask, or is not whole, and no use of them.
        """
        if self.mask_source is not None:
            spec = self.mask_source.chain.first
            keep = self.mask_source.compute(device, for_(spec, operands))[-1]
            without = ("dropout_key", "dropout_start")
            spec = changed(self.chain.spec, without=without, arrays={"keep": (keep.shape, "bool")})
            return xla.backward(spec, device, for_(spec, {**operands, "keep": keep}))

        def by(implementation: Implementation) -> Compute:
            def compute(
                spec: AttentionSpec, operands: Mapping[str, jax.Array]
            ) -> dict[str, jax.Array]:
                is_backward, taker = spec.is_backward, cast("object", implementation)
                if mask is not None and not self.chain.steps and isinstance(taker, TakesMask):
                    run = taker.backward if is_backward else taker.forward
                    results = run(spec, device, operands, mask)
                else:
                    run = implementation.backward if is_backward else implementation.forward
                    results = run(spec, device, operands)
                return dict(zip(spec.result_names, results, strict=True))

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
        headline = "no implementation can run this attention call"
        text = fallback.message(headline, spec, device, refused)
        remedy = remedy_elsewhere(spec.meaning.implementation, device)
        raise NotImplementedError(f"{text}\n  remedy: {remedy}" if remedy else text)
    if not spec.meaning.implementation:
        if choice.implementation.PLATFORM is None and found.vendor_refused:
            _fall_back(spec, device, choice, refused)
        elif choice.chain.may_fall_back:
            why = reasons_as_it_is(choice.implementation, spec, device)
            _fall_back(spec, device, choice, {choice.NAME: why})
    return choice


def _fall_back(
    spec: AttentionSpec, device: Device, choice: Choice, refused: fallback.Refusals
) -> None:
    """Leave it to the fallback policy whether XLA may compute the call."""
    source = choice.mask_source
    fallback.warn_or_raise(
        fallback.Fallback(
            spec,
            device,
            IMPLEMENTATIONS[-1].NAME if choice.chain.may_fall_back else choice.NAME,
            refused,
            is_certain=not choice.chain.may_fall_back,
            how="" if source is None else under_mask_of(source),
        ),
        lambda: _backward_refusals(spec, device),
    )


def _backward_refusals(spec: AttentionSpec, device: Device) -> fallback.Refusals:
    """The reasons against the backward pass of a forward call that will have one."""
    backward = spec.expected_backward()
    if backward is None:
        return {}
    found: dict[str, tuple[Reason, ...]] = {}
    for implementation in implementations():
        if implementation.PLATFORM == device.platform and _is_usable(implementation, device):
            found[implementation.NAME], _ = reasons_and_chain(implementation, backward, device)
            if not found[implementation.NAME]:
                return {}
    return found


def winner(spec: AttentionSpec, device: Device) -> Winner | None:
    """The fastest way that tuning found for the call, if one is known and it can run here."""
    found = winners.find(spec, device, versions)
    if found is None or found.implementation not in (spec.meaning.implementation or names()):
        return None
    if settings.current().fallback == "error" and named(found.implementation).PLATFORM is None:
        return None
    return found if by_engine(spec, device, found.implementation, found.engine) else None


def some_take_masks() -> bool:
    """Whether an implementation that is installed takes masks as arrays."""
    takers = [x for x in implementations() if isinstance(x, TakesMask)]
    return any(map(is_installed, takers))


def mask_tiles(spec: AttentionSpec, device: Device) -> TileSizes | None:
    """The tiles in which the implementation that is asked first takes the call's mask as arrays.

    None if it takes none, or refuses the call. No other implementation plans it for that. Whether
    the call is all of its program is known when it is lowered; here either may be.
    """
    now = settings.current()
    for is_alone in (False, True):
        with settings.restored(replace(now, is_alone=is_alone)):
            first = _first_expected(spec, device)
        if first is not None and isinstance(first[0], TakesMask):
            return first[0].mask_tiles(first[1], device)
    return None


def _first_expected(
    spec: AttentionSpec, device: Device
) -> tuple[Implementation, AttentionSpec] | None:
    """The implementation that is asked first and, if the caller left it open, is for the device."""
    is_open = not spec.meaning.implementation
    asked = asked_in_order(spec, device)
    return next((x for x in asked if not is_open or is_expected(x[0], device)), None)


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
    found = [x.version() for x in implementations() if x.PLATFORM == device.platform]
    found.append(device.library)
    return {"attn_dispatch": __version__, **dict(version for version in found if version)}


def has_kernel(spec: AttentionSpec, device: Device) -> bool:
    """Whether `choose` would choose a vendor's kernel; without a warning."""
    choice = _first_eligible(spec, device).choice
    return choice is not None and choice.implementation.PLATFORM is not None


def chosen_alone(spec: AttentionSpec, device: Device) -> str | None:
    """The implementation that runs the call if it is all that its program computes."""
    with settings.restored(replace(settings.current(), is_alone=True)):
        choice = _first_eligible(spec, device).choice
    return None if choice is None else choice.NAME


@dataclass(frozen=True)
class _Found:
    choice: Choice | None
    refused: dict[str, tuple[Reason, ...]]
    """The reasons of the implementations asked before the chosen one."""
    vendor_refused: bool
    """Whether one of them is not an extra: only then is XLA a fallback to warn of."""


def _first_eligible(spec: AttentionSpec, device: Device) -> _Found:
    """The first implementation in order of preference that can run this call."""
    refused: dict[str, tuple[Reason, ...]] = {}
    is_open, vendor_refused = not spec.meaning.implementation, False
    for implementation, asked in asked_in_order(spec, device):
        if is_open and not is_expected(implementation, device):
            continue
        reasons, chain = reasons_and_chain(implementation, asked, device)
        if not reasons:
            mask_source = mask_source_of(implementation, asked, device)
            return _Found(Choice(implementation, chain, mask_source), refused, vendor_refused)
        refused[implementation.NAME] = reasons
        vendor_refused |= not implementation.IS_EXTRA
    return _Found(None, refused, vendor_refused)


def formula(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """out and lse of a forward call in plain JAX, which JAX can differentiate.

    Raises:
      NotImplementedError: with every reason, if there are no formulas for this call.
    """
    if reasons := xla.not_supported_reasons(spec, CPU):
        headline = "this attention call has no formulas to differentiate"
        message = fallback.message(headline, spec, CPU, {xla.NAME: reasons})
        raise NotImplementedError(message)
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
    if spec.is_empty:
        return  # its tangents are constants
    if spec.meaning.dropout_rate:
        drawn_by = choose(spec.returning(replace(spec.wanted, derivative=None)), device)
        spec = spec.by(drawn_by.NAME)
    choose(spec, device)


def mask_source_of(
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


def under_mask_of(mask_source: Choice) -> str:
    return (
        f"under the dropout mask of {mask_source.NAME}, whose forward pass runs again to return "
        "it: one byte for each pair of a query and a key"
    )


def remedy_elsewhere(wanted: Sequence[str], device: Device) -> str:
    """What to do if the named implementations are all for other devices; otherwise ""."""
    platforms = {named(x).PLATFORM for x in wanted}
    if not wanted or platforms & {None, device.platform}:
        return ""
    here = [repr(x.NAME) for x in implementations() if is_expected(x, device)]
    return f"leave the implementation out, or name one that runs on this device: {', '.join(here)}"


def is_expected(implementation: Implementation, device: Device) -> bool:
    """Whether the implementation is for the device's platform or for all and, if it is an extra,
    usable there."""
    is_elsewhere = implementation.PLATFORM not in (None, device.platform)
    return not is_elsewhere and _is_usable(implementation, device)


def _is_usable(implementation: Implementation, device: Device) -> bool:
    """False for an extra whose package is missing or whose library cannot run on the device.

    True for every other implementation: if it is unusable, its reasons say why.
    """
    if not implementation.IS_EXTRA:
        return True
    return is_installed(implementation) and not implementation.unusable_reason(device)


@cache
def is_installed(extra: Implementation) -> bool:
    """Whether the package of an extra is installed. Cached: that does not change in a process."""
    return extra.version() is not None


def asked_in_order(
    spec: AttentionSpec, device: Device
) -> list[tuple[Implementation, AttentionSpec]]:
    """Each implementation with the call that it is asked about, a tuned winner first."""
    preferred = _preferred(spec, device)
    if (found := winner(spec, device)) is None:
        return [(x, spec) for x in preferred]
    first = named(found.implementation)
    others = [(x, spec) for x in preferred if x is not first]
    return [(first, _with_engine(spec, found.engine)), *others]


def ranked(spec: AttentionSpec, device: Device) -> Ranking:
    """The order of implementations for a call; without predictions if the caller named some."""
    if wanted := spec.meaning.implementation:
        return Ranking(tuple(map(named, wanted)), {})
    return ranking(implementations(), spec, device, is_expected)


def _with_engine(spec: AttentionSpec, engine: str) -> AttentionSpec:
    return replace(spec, options=replace(spec.options, engine=engine))


def _preferred(spec: AttentionSpec, device: Device) -> Sequence[Implementation]:
    return ranked(spec, device).order
