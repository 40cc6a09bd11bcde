"""What an implementation is: a module with these names, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.reason import Reason


@dataclass(frozen=True)
class Plan:
    """How an eligible call would run."""

    engine: str
    workspace_bytes: int
    """Scratch memory of the kernel."""
    other_bytes: int = 0
    """Further memory that the call takes beside its operands and results: of the arrays that its
    program makes around the kernel."""

    @property
    def scratch_bytes(self) -> int:
        """All the memory that the call takes beside its operands and results."""
        return self.workspace_bytes + self.other_bytes


def device_reason(what: str, device: Device, text: str) -> Reason:
    """Why no call runs on a device, by `what` of it: its "platform", its "arch"."""
    return Reason(f"device/{what}", (("device", str(device)),), text)


class Implementation(Protocol):
    """One way to compute attention. Modules satisfy this, no class needs to."""

    @property
    def NAME(self) -> str:
        """What the user writes in `implementation=`."""
        ...

    @property
    def PLATFORM(self) -> str | None:
        """The one platform it runs on, in lowering's words; None where it runs on all."""
        ...

    @property
    def IS_EXTRA(self) -> bool:
        """Whether it comes with a package of its own, which nobody misses where it is not
        installed."""
        ...

    @property
    def KEEPS_NAN_APART(self) -> bool:
        """Whether NaN in one sequence of a batch row reaches no other.

        Where whole matrices or tiles are multiplied it does: 0 · NaN is NaN.
        """
        ...

    @property
    def DROPS_BY_POSITION(self) -> bool:
        """Whether its dropout mask is that of the position in the whole call (dropout_start)."""
        ...

    @property
    def HAS_DECODING_KERNEL(self) -> bool:
        """Whether a single query of each row, beside lengths, has a kernel that takes all query
        heads of a kv head at once and has no window."""
        ...

    @property
    def SKIPS_FROM_BOTTOM_RIGHT(self) -> bool:
        """Whether its backward pass skips keys left of a window that is counted from the bottom
        right."""
        ...

    def not_supported_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        """Every reason why this call cannot run on this device; empty means it can."""
        ...

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        """How the call would run; only for calls without reasons against it."""
        ...

    def other_engines(self, spec: AttentionSpec, device: Device) -> tuple[str, ...]:
        """What else `spec.options.engine` may be for the call, if tuning is to try it: engines like
        the one that it names, none of which need exist. () without such a choice."""
        ...

    def unusable_reason(self, device: Device) -> str:
        """Why no call at all can run on this device here; empty if some can."""
        ...

    def version(self) -> tuple[str, str] | None:
        """The vendor's library and its version, as far as they can be told; None without one."""
        ...

    def library_lines(self) -> list[str]:
        """What there is of the vendor's library here, for `attn-dispatch info`."""
        ...

    def forward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """out and what else was asked for: `spec.results`."""
        ...

    def backward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """The gradients of `spec.wanted.gradients`, in their order."""
        ...
