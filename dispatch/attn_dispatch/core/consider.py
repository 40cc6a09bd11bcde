"""What speaks against an implementation for a call: as it is, rewritten, and in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from attn_dispatch import settings, xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import scratch
from attn_dispatch.core.rewrites import Chain, in_parts, preferred, rewritten
from attn_dispatch.core.rewrites.in_parts import Axis, InParts
from attn_dispatch.core.rewrites.rewrite import MOST_PAIRS, is_affordable
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation
from attn_dispatch.terminal.text import in_units

FORMULAS = xla
"""The implementation whose forward pass is there as plain JAX too."""

GOES_BACK = xla
"""The implementation whose backward pass takes a dropout mask that another one drew."""


def consider(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[tuple[str, ...], Chain]:
    """Why it cannot run the call, or the one of the other direction that it must run as well.

    Where there is no reason, it runs the call as the chain has it.
    """
    reasons, chain = _one_way(implementation, spec, device)
    if spec.partner is not None:
        direction = "forward" if spec.is_backward else "backward"
        others, _ = _one_way(implementation, spec.partner, device)
        if others and not spec.is_backward and mask_of(implementation, spec, device) is not None:
            return reasons, chain
        could_begin = others and not (reasons or spec.is_backward or spec.symbols)
        reasons += tuple(
            f"{reason} (in the {direction} pass, which must draw the same dropout mask)"
            for reason in others
            if reason not in reasons
        )
        if could_begin and _may_be_xlas(spec) and not is_affordable(_pairs(spec)):
            reasons += (
                f"dropout: XLA would go back under its mask, were that not of {_pairs(spec)} "
                f"entries, over {MOST_PAIRS:,}",
            )
    return reasons, chain


def mask_of(implementation: Implementation, spec: AttentionSpec, device: Device) -> Chain | None:
    """How the implementation draws the mask of a forward call, if XLA may go back under it.

    The chain's call has the mask as its last result.
    """
    if implementation is GOES_BACK or not _may_be_xlas(spec) or spec.symbols:
        return None
    if spec.options.derivative is not None or not is_affordable(_pairs(spec)):
        return None
    options = replace(spec.options, needs_keep=True, needs_max=False, partner=None)
    reasons, chain = _one_way(implementation, replace(spec, options=options), device)
    return None if reasons else chain


def _pairs(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The shape of a mask: that of the scores, which XLA has a block at a time."""
    return spec.batch, spec.num_heads, spec.seq_len_q, spec.seq_len_kv


def _may_be_xlas(spec: AttentionSpec) -> bool:
    wanted = spec.options.implementation
    return not wanted or xla.NAME in wanted


def _one_way(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[tuple[str, ...], Chain]:
    """Why it runs the call neither as it is nor rewritten: what speaks against it as it is."""
    reasons = reasons_as_it_is(implementation, spec, device)
    # XLA takes every call as it is, and on another vendor's device nothing helps.
    is_elsewhere = implementation.PLATFORM != device.platform
    is_out_of_reach = spec.symbols or spec.options.derivative is not None
    if is_elsewhere or is_out_of_reach:
        return reasons, Chain((), spec, reasons)
    current = settings.current()

    def parts(chains: Sequence[Chain]) -> tuple[InParts, ...]:
        return _parts(implementation, chains, device)

    liked = preferred(
        has_decoding_kernel=implementation.HAS_DECODING_KERNEL,
        skips_from_bottom_right=implementation.SKIPS_FROM_BOTTOM_RIGHT,
    )
    is_liked = any(rewrite.inner(spec) is not None for rewrite in liked)
    has_cause = reasons or spec.options.dropout_rate or current.first_rewrite or is_liked
    if not current.rewrites:
        chain = Chain((), spec, reasons)
    elif has_cause:
        chain = rewritten(
            spec,
            lambda spec: reasons_as_it_is(implementation, spec, device),
            preferred=liked,
            parts=parts,
            may_fall_back=current.fallback != "error" and _may_be_xlas(spec),
            first=current.first_rewrite,
        )
    else:
        chain = Chain((), spec, ())
        chain = in_parts(chain, parts([chain]))
    if chain.reasons:
        return reasons or chain.reasons, chain
    return _within_limit(implementation, chain, device)


def _scratch_of(implementation: Implementation, chain: Chain, device: Device) -> scratch.Scratch:
    """The scratch memory of calls, of which it runs at least the one of the chain."""

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
) -> tuple[InParts, ...]:
    """The parts of calls that it runs, as many as the one takes that needs most of them."""
    sizes: dict[Axis, int] = {}
    for chain in chains:
        if (limit := _limit(chain.first, device)) is not None:
            bytes_of = _scratch_of(implementation, chain, device)
            for step in scratch.parts_within(
                chain.spec, bytes_of, limit.bytes, is_strict=limit.is_strict
            ):
                sizes[step.axis] = min(step.size, sizes.get(step.axis, step.size))
    return tuple(InParts(axis, size) for axis, size in sizes.items())


def _within_limit(
    implementation: Implementation, chain: Chain, device: Device
) -> tuple[tuple[str, ...], Chain]:
    """A chain of a call that it runs, with what the limit did, or why the limit forbids it."""
    limit = _limit(chain.first, device)
    if limit is None or not (chain.undivided or limit.is_strict):
        return (), chain
    taken = scratch_bytes(implementation, chain, device)
    most = f"the limit is {in_units(limit.bytes)} ({limit.why})"
    if taken > limit.bytes and limit.is_strict:
        parts = ", even in parts" if chain.undivided else ""
        reason = f"scratch memory: takes {in_units(taken)}{parts}, and {most}"
        return (reason,), replace(chain, reasons=(reason,))
    if chain.undivided is None:
        return (), chain
    before = implementation.plan(chain.undivided, device).scratch_bytes
    did = f"{in_units(taken)} in place of {in_units(before)}; {most}"
    return (), replace(chain, limit=did)


def scratch_bytes(implementation: Implementation, chain: Chain, device: Device) -> int:
    """The memory that a chain takes beside operands and results of the call that it asks for."""
    own = sum(x.own_bytes(spec) for x, spec in chain.steps if isinstance(x, InParts))
    return own + implementation.plan(chain.spec, device).scratch_bytes


def reasons_as_it_is(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[str, ...]:
    """Why it does not run this very call."""
    if spec.symbols and implementation is not FORMULAS:
        symbols = ", ".join(spec.symbols)
        return (f"its kernels are planned for shapes that are known, and {symbols} is a symbol",)
    reasons = implementation.not_supported_reasons(spec, device)
    if spec.options.derivative is not None and implementation is not FORMULAS:
        reasons += (
            f"it has kernels for the call and for its gradients (jax.grad, jax.vjp), and none for "
            f'a {spec.options.derivative}; implementation="{FORMULAS.NAME}" computes that',
        )
    wants_same = settings.current().sharded_dropout == "same"
    if spec.options.dropout_rate and wants_same and not implementation.DROPS_BY_POSITION:
        reasons += (
            'dropout under sharded_dropout("same"): the kernel counts rows and heads from its own '
            "first, so its mask is another for another number of devices",
        )
    return reasons
