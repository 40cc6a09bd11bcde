"""Decides whether one implementation runs one call, as it is or by rewrites.

It returns all reasons, or the chain of rewrites by which the call runs. It does not choose among
implementations (select.py), and not among rewrites (rewrites/search.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from attn_dispatch import settings, xla
from attn_dispatch.call.features import OFFSET_RULE
from attn_dispatch.call.options import FORWARD_MODE
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import scratch
from attn_dispatch.core.nearest import reasons_to_read
from attn_dispatch.core.rewrites import (
    Chain,
    Reasons,
    Rewrite,
    Terms,
    divided,
    preferred,
    rewritten,
)
from attn_dispatch.core.rewrites.in_parts import in_parts_of
from attn_dispatch.core.rewrites.rewrite import MAX_PAIR_ENTRIES, Axis, is_affordable
from attn_dispatch.core.unplanned import certain_reasons, is_unknown
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import NOTHING, ComputesTangents, Implementation, Plan
from attn_dispatch.reason import Reason, Rule, broken, rules_of
from attn_dispatch.text import in_units


def reasons_and_chain(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[tuple[Reason, ...], Chain]:
    """The reasons against the call, and the rewrites by which it runs if there are none.

    Under dropout both directions must draw the same mask. Then the reasons against the call of the
    other direction count too, unless XLA can compute the backward pass with the kernel's mask.
    """
    reasons, chain = _one_direction(implementation, spec, device)
    if spec.partner is not None and not is_unknown(reasons):
        direction = "forward" if spec.is_backward else "backward"
        others, _ = _one_direction(implementation, spec.partner, device)
        others = () if is_unknown(others) else others
        if others and not spec.is_backward and mask_chain(implementation, spec, device) is not None:
            return reasons, chain
        could_begin = others and not (reasons or spec.is_backward or spec.symbols)
        note = f"in the {direction} pass, which must draw the same dropout mask"
        reasons += tuple(
            reason.where(note, ("direction", direction))
            for reason in others
            if reason not in reasons
        )
        if could_begin and _may_use_xla(spec):
            reasons += broken((_MASK_FOR_XLA,), spec)
    return reasons, chain


def mask_chain(implementation: Implementation, spec: AttentionSpec, device: Device) -> Chain | None:
    """The chain by which the implementation returns the dropout mask of a forward call.

    Its call has the mask as its last result. None if XLA may not compute the backward pass with
    this mask, or if the implementation cannot return it.
    """
    if implementation is xla or not _may_use_xla(spec) or spec.symbols:
        return None
    if spec.wanted.derivative is not None or not is_affordable(_pairs(spec)):
        return None
    wanted = replace(spec.wanted, needs_keep=True, needs_max=False, partner=None)
    reasons, chain = _one_direction(implementation, spec.returning(wanted), device)
    return None if reasons else chain


def _pairs(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The shape of a mask, which is that of the scores; XLA holds one block of them at a time."""
    return spec.batch, spec.num_heads, spec.seq_len_q, spec.seq_len_kv


def _in_parts_of_the_batch(spec: AttentionSpec) -> str:
    """The remedy if there are several batch rows and the mask of one is small enough."""
    batch, *of_a_row = _pairs(spec)
    is_enough = batch > 1 and is_affordable((1, *of_a_row))
    return "make calls for a part of the batch each" if is_enough else ""


_MASK_FOR_XLA = Rule[AttentionSpec](
    "dropout_mask_for_xla",
    lambda spec: not is_affordable(_pairs(spec)),
    "dropout: the XLA backward pass would need the kernel's mask, {shape}; the limit is "
    f"{MAX_PAIR_ENTRIES:,} entries",
    _in_parts_of_the_batch,
    facts=lambda spec: {"shape": _pairs(spec)},
)


def _may_use_xla(spec: AttentionSpec) -> bool:
    wanted = spec.meaning.implementation
    return not wanted or xla.NAME in wanted


def _one_direction(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[tuple[Reason, ...], Chain]:
    """The reasons against the nearest form of the call, rewritten or not, and the rewrites."""

    @cache
    def against(spec: AttentionSpec) -> tuple[Reason, ...]:
        return reasons_as_it_is(implementation, spec, device)

    reasons = against(spec)
    # XLA runs every call as it is, and on another vendor's device no rewrite helps.
    is_elsewhere = implementation.PLATFORM != device.platform
    is_out_of_reach = spec.symbols or spec.wanted.derivative is not None
    if is_elsewhere or is_out_of_reach:
        reasons = certain_reasons(spec, reasons, None)
        chain = Chain((), spec, reasons)
        if reasons or is_elsewhere or spec.symbols or implementation is xla:
            return reasons, chain
        return _within_limit(implementation, chain, device)
    current = settings.current()
    terms = _terms(implementation, spec, against)
    if reasons and is_unknown(reasons):
        found = certain_reasons(spec, reasons, terms if current.rewrites else None)
        return found, Chain((), spec, found)

    def parts(chains: Sequence[Chain]) -> tuple[Rewrite, ...]:
        return _parts(implementation, chains, device)

    chain = Chain((), spec, reasons)
    has_cause = reasons or terms.preferred or spec.meaning.dropout_rate or current.first_rewrite
    if current.rewrites and has_cause:
        chain = rewritten(spec, replace(terms, choose_parts=parts))
    elif current.rewrites and (steps := parts([chain])):
        chain = divided(chain, steps)
    if chain.reasons:
        # If the implementation runs no call on this device, every rewritten form is refused too:
        # the reasons to read are those against the call itself.
        is_near = current.rewrites and not implementation.unusable_reason(device)
        return reasons_to_read(chain, reasons, against) if is_near else reasons, chain
    return _within_limit(implementation, chain, device)


def _terms(implementation: Implementation, spec: AttentionSpec, against: Reasons) -> Terms:
    """The terms of a search that divides nothing into parts."""
    current = settings.current()
    preferred_rewrites = preferred(
        spec.options.operands,
        is_backward=spec.is_backward,
        has_decoding_kernel=implementation.HAS_DECODING_KERNEL,
        skips_from_bottom_right=implementation.SKIPS_FROM_BOTTOM_RIGHT,
        has_refused_offset=spec.meaning.causal_alignment == "by_offset"
        and OFFSET_RULE in rules_of(against(spec)),
    )
    return Terms(
        against,
        preferred=preferred_rewrites,
        may_fall_back=current.fallback != "error" and _may_use_xla(spec),
        first=current.first_rewrite,
    )


def _scratch_of(implementation: Implementation, chain: Chain, device: Device) -> scratch.Scratch:
    """A function that returns the scratch memory of a call, None if the implementation does not run
    the call. It does run the chain's call."""

    @cache
    def bytes_of(spec: AttentionSpec) -> int | None:
        if spec != chain.spec and reasons_as_it_is(implementation, spec, device):
            return None
        return implementation.plan(spec, device).scratch_bytes

    return bytes_of


def _limit(spec: AttentionSpec, device: Device) -> scratch.Limit | None:
    return scratch.limit_of(spec, device, lambda: xla.plan(spec, device).scratch_bytes)


def _parts(
    implementation: Implementation, chains: Sequence[Chain], device: Device
) -> tuple[Rewrite, ...]:
    """The parts in which all these calls run: those of the call that needs the most parts."""
    sizes: dict[Axis, int] = {}
    for chain in chains:
        if (limit := _limit(chain.first, device)) is not None:
            bytes_of = _scratch_of(implementation, chain, device)
            for step in scratch.parts_within(
                chain.spec, bytes_of, limit.bytes, is_strict=limit.is_strict
            ):
                assert step.parts is not None
                axis, size = step.parts.axis, step.parts.size
                sizes[axis] = min(size, sizes.get(axis, size))
    return tuple(in_parts_of(axis, size) for axis, size in sizes.items())


def _within_limit(
    implementation: Implementation, chain: Chain, device: Device
) -> tuple[tuple[Reason, ...], Chain]:
    """Apply the limit on scratch memory to a chain without reasons.

    Returns the chain, with what the limit changed, or the reason that the limit gives.
    """
    if chain.undivided is None and not scratch.is_strict():
        return (), chain
    if (limit := _limit(chain.first, device)) is None:
        return (), chain
    taken = scratch_bytes(implementation, chain, device)
    if reasons := broken((_SCRATCH_LIMIT,), _Scratch(taken, limit, chain.undivided is not None)):
        return reasons, replace(chain, reasons=reasons)
    if chain.undivided is None:
        return (), chain
    before = implementation.plan(chain.undivided, device).scratch_bytes
    did = f"{in_units(taken)} in place of {in_units(before)}; {_most(limit)}"
    return (), replace(chain, limit=did)


def _most(limit: scratch.Limit) -> str:
    return f"the limit is {in_units(limit.bytes)} ({limit.why})"


@dataclass(frozen=True)
class _Scratch:
    """The scratch memory that a call takes, and its limit."""

    bytes: int
    limit: scratch.Limit
    is_divided: bool


_SCRATCH_LIMIT = Rule[_Scratch](
    "scratch_limit",
    lambda x: x.limit.is_strict and x.bytes > x.limit.bytes,
    "scratch memory: takes {taken}{parts}, and {most}",
    "set a larger scratch_limit",
    facts=lambda x: {
        "bytes": x.bytes,
        "taken": in_units(x.bytes),
        "parts": ", even in parts" if x.is_divided else "",
        "most": _most(x.limit),
    },
)


def scratch_bytes(implementation: Implementation, chain: Chain, device: Device) -> int:
    """The memory that a chain takes beside the operands and results of its last call."""
    own = sum(rewrite.own_bytes(outer) for rewrite, outer in chain.steps)
    return own + plan_of(implementation, chain, device).scratch_bytes


def plan_of(implementation: Implementation, chain: Chain, device: Device) -> Plan:
    """The plan of what a chain runs in the end."""
    return NOTHING if chain.is_constant else implementation.plan(chain.spec, device)


def reasons_as_it_is(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[Reason, ...]:
    """The reasons why the implementation does not run this call without rewrites."""
    if spec.symbols and implementation is not xla:
        return (_SYMBOLS.reason(spec),)
    reasons = implementation.not_supported_reasons(spec, device)
    if _DERIVATIVE.applies(spec) and not _computes_derivative(implementation, spec):
        reasons += (_DERIVATIVE.reason(spec),)
    if _SAME_DROPOUT.applies(spec) and not implementation.DROPS_BY_POSITION:
        reasons += (_SAME_DROPOUT.reason(spec),)
    return reasons


def _computes_derivative(implementation: Implementation, spec: AttentionSpec) -> bool:
    is_tangent = spec.wanted.derivative == FORWARD_MODE
    return implementation is xla or (is_tangent and isinstance(implementation, ComputesTangents))


_SYMBOLS = Rule[AttentionSpec](
    "symbols",
    lambda spec: bool(spec.symbols),
    "its kernels are planned for known shapes, and {symbols} is a symbol",
    facts=lambda spec: {"symbols": ", ".join(spec.symbols)},
)

_DERIVATIVE_REMEDIES = (
    f'pass implementation="{xla.NAME}"',
    "let `fa4` compute it on sm90: run `attn-dispatch build-fa4`, and name it if you name "
    f'implementations; or pass implementation="{xla.NAME}"',
)
"""For second derivatives, and for forward-mode ones."""

_DERIVATIVE = Rule[AttentionSpec](
    "derivative",
    lambda spec: spec.wanted.derivative is not None,
    "it has kernels for the call and for its gradients (jax.grad, jax.vjp), and none for a "
    "{derivative}",
    lambda spec: _DERIVATIVE_REMEDIES[spec.wanted.derivative == FORWARD_MODE],
    facts=lambda spec: {"derivative": spec.wanted.derivative},
)

_SAME_DROPOUT = Rule[AttentionSpec](
    "sharded_dropout",
    lambda spec: spec.meaning.dropout_rate > 0 and settings.current().sharded_dropout == "same",
    'dropout under sharded_dropout("same"): the kernel counts rows and heads from 0 on each '
    "device, so its mask depends on the number of devices",
)
