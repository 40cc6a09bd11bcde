"""An implementation that refuses what a test says, and computes constants."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.reason import Reason, reason_from_sentence


@dataclass(frozen=True)
class Fake:
    """An implementation that refuses calls with the given reasons and returns constants."""

    NAME: str
    reasons: tuple[str, ...] = ()
    PLATFORM: str | None = "cuda"
    IS_EXTRA: bool = False
    HAS_DECODING_KERNEL: bool = False
    SKIPS_FROM_BOTTOM_RIGHT: bool = True

    def not_supported_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        return tuple(reason_from_sentence(self.NAME, f"{x} on {device.arch}") for x in self.reasons)

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        reasons = self.not_supported_reasons(spec, device)
        assert not reasons, "only an eligible call is planned"
        return Plan(f"{self.NAME} engine", 1234 if spec.is_backward else 0)

    def unusable_reason(self, device: Device) -> str:
        return ""

    def version(self) -> tuple[str, str]:
        return self.NAME, "1"

    def forward(self, spec, device, operands):
        return tuple(jnp.full(x.shape, len(self.NAME), x.dtype) for x in spec.results)

    backward = forward
