"""Choosing who computes a call: implementations in order, and all reasons against each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from attn_dispatch import aiter, cudnn, settings, xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation, Plan

IMPLEMENTATIONS: tuple[Implementation, ...] = (cudnn, aiter, xla)
"""Best first; the last one runs everywhere."""


class AttentionFallbackWarning(UserWarning):
    """XLA computes a call on a GPU because no vendor kernel can."""


@dataclass(frozen=True)
class Verdict:
    """Whether one implementation can run one call."""

    implementation: str
    reasons: tuple[str, ...]
    """Everything that speaks against it; empty means eligible."""
    plan: Plan | None
    """How it would run, if eligible."""

    @property
    def is_eligible(self) -> bool:
        return not self.reasons


def names() -> tuple[str, ...]:
    """What `implementation=` accepts."""
    return tuple(implementation.NAME for implementation in IMPLEMENTATIONS)


def verdicts(spec: AttentionSpec, device: Device) -> tuple[Verdict, ...]:
    """The verdict of every implementation on this call, in order of preference."""
    result = []
    for implementation in _preferred(spec):
        reasons = _reasons(implementation, spec, device)
        plan = None if reasons else implementation.plan(spec, device)
        result.append(Verdict(implementation.NAME, reasons, plan))
    return tuple(result)


def choose(spec: AttentionSpec, device: Device) -> Implementation:
    """The first implementation in order of preference that can run this call.

    Where the caller left the choice open and it falls away from the vendor's kernel on a GPU, the
    fallback policy (`attn_dispatch.fallback`) says so.

    Raises:
      NotImplementedError: with every reason, if none can, or if the policy is "error".
    """
    refused: dict[str, tuple[str, ...]] = {}
    is_open = not spec.options.implementation
    for implementation in _preferred(spec):
        if is_open and implementation.PLATFORM not in (None, device.platform):
            continue  # the other vendor's: nobody expected it here
        reasons = _reasons(implementation, spec, device)
        if not reasons:
            if refused and is_open:
                _announce_fallback(spec, device, implementation.NAME, refused)
            return implementation
        refused[implementation.NAME] = reasons
    raise NotImplementedError(
        _message("no implementation can run this attention call", spec, device, refused)
    )


def _reasons(
    implementation: Implementation, spec: AttentionSpec, device: Device
) -> tuple[str, ...]:
    """Why it cannot run the call, or the one of the other direction that it must run as well."""
    reasons = implementation.not_supported_reasons(spec, device)
    if spec.partner is not None:
        direction = "forward" if spec.is_backward else "backward"
        others = implementation.not_supported_reasons(spec.partner, device)
        reasons += tuple(
            f"{reason} (in the {direction} pass, which must draw the same dropout mask)"
            for reason in others
            if reason not in reasons
        )
    return reasons


def _preferred(spec: AttentionSpec) -> Sequence[Implementation]:
    wanted = spec.options.implementation
    if not wanted:
        return IMPLEMENTATIONS
    by_name = {implementation.NAME: implementation for implementation in IMPLEMENTATIONS}
    return [by_name[name] for name in wanted]


def _announce_fallback(
    spec: AttentionSpec, device: Device, chosen: str, refused: dict[str, tuple[str, ...]]
) -> None:
    policy = settings.current().fallback
    if policy == "silent":
        return
    message = _message(f"attention falls back to {chosen}", spec, device, refused)
    if policy == "error":
        raise NotImplementedError(message)
    _warn_once(message)


@lru_cache(maxsize=4096)
def _warn_once(message: str) -> None:
    """Once per message, which is once per spec and device, whatever the warning filters say."""
    warnings.warn(message, AttentionFallbackWarning, stacklevel=2)


def _message(
    headline: str, spec: AttentionSpec, device: Device, refused: dict[str, tuple[str, ...]]
) -> str:
    lines = [headline, f"  call: {spec}", f"  device: {device}"]
    for name, reasons in refused.items():
        lines.append(f"  {name}:")
        lines.extend(f"    - {reason}" for reason in reasons)
    return "\n".join(lines)
