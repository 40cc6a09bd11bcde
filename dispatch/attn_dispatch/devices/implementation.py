"""The interface of an implementation: a module with these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import UNKNOWN_ARCH, Device
from attn_dispatch.reason import Reason


@dataclass(frozen=True)
class Plan:
    """The plan of a call that can run: the engine and its memory."""

    engine: str
    workspace_bytes: int
    """Scratch memory of the kernel."""
    other_bytes: int = 0
    """Memory of the arrays that the program makes around the kernel, such as padded copies."""
    engine_is_code: bool = False
    """Whether the name of the engine is a code of the vendor's library. Commands leave codes out
    unless they are asked for them."""

    @property
    def scratch_bytes(self) -> int:
        """All the memory that the call takes beside its operands and results."""
        return self.workspace_bytes + self.other_bytes


NOTHING = Plan("nothing to compute", 0)
"""The plan of a call whose results are constants."""


def device_reason(what: str, device: Device, text: str) -> Reason:
    """The reason why no call runs on a device, because of `what`: its "platform" or "arch"."""
    return Reason(f"device/{what}", (("device", str(device)),), text)


def platform_reasons(who: str, platform: str, device: Device) -> tuple[Reason, ...]:
    """The reason why `who` runs no call on a device of another platform; empty on its own."""
    if device.platform == platform:
        return ()
    text = f"{who} runs on {_PLATFORMS[platform][0]} GPUs, and this is {device}"
    return (device_reason("platform", device, text),)


def require_arch(device: Device) -> None:
    """Raises RuntimeError if there is neither a device of the platform nor a target."""
    if device.arch == UNKNOWN_ARCH:
        _, name, example = _PLATFORMS[device.platform]
        raise RuntimeError(
            f"attn_dispatch is lowering for {device.platform}, and there is neither a {name} "
            "device here nor a target to plan for. Name one: "
            f'`with attn_dispatch.target("{example}"):` around the lowering, or '
            f"ATTN_DISPATCH_TARGET={example} in the environment."
        )


_PLATFORMS = {"cuda": ("NVIDIA", "CUDA", "sm90"), "rocm": ("AMD", "ROCm", "gfx942")}
"""The vendor, the platform's name, and a target."""


def library_reason(rule: str, state: str) -> Reason:
    """The reason why no call runs: the state of a vendor's library, as a sentence."""
    return Reason(rule, (("state", state),), state)


_PLANNER = "/planner"


def planner_reason(name: str, state: str, install: str) -> Reason:
    """The reason why it is unknown which calls run on a device that is not here.

    Args:
      name: the implementation's.
      state: what its planner lacks, as a sentence.
      install: the command that installs it; "" if there is none.
    """
    return Reason(f"{name}{_PLANNER}", (("state", state),), state, install)


def is_about_planner(reason: Reason) -> bool:
    """Whether this is a `planner_reason`: then the call may run once the planner is here."""
    return reason.rule.endswith(_PLANNER)


class Implementation(Protocol):
    """One way to compute attention. A module satisfies this protocol; no class is needed."""

    @property
    def NAME(self) -> str:
        """The name that the user passes as `implementation=`."""
        ...

    @property
    def PLATFORM(self) -> str | None:
        """The platform that it runs on, by lowering's name; None if it runs on all."""
        ...

    @property
    def IS_EXTRA(self) -> bool:
        """True for an extra: a package that may be missing, without a warning, is needed."""
        ...

    @property
    def KEEPS_NAN_APART(self) -> bool:
        """Whether NaN in one sequence of a batch row never reaches another one.

        NaN reaches it where whole matrices or tiles are multiplied, because 0 · NaN is NaN.
        """
        ...

    @property
    def DROPS_BY_POSITION(self) -> bool:
        """Whether the dropout mask depends on positions in the whole call (dropout_start)."""
        ...

    @property
    def HAS_DECODING_KERNEL(self) -> bool:
        """Whether a single query per row, with lengths and no window, has a kernel that takes all
        query heads of a kv head at once."""
        ...

    @property
    def SKIPS_FROM_BOTTOM_RIGHT(self) -> bool:
        """Whether the backward pass skips the keys left of a bottom-right window."""
        ...

    def not_supported_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        """Every reason why this call cannot run on this device; empty means that it can."""
        ...

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        """The plan of a call that has no `not_supported_reasons`."""
        ...

    def other_engines(self, spec: AttentionSpec, device: Device) -> tuple[str, ...]:
        """Further values of `spec.options.engine` that tuning should try for the call.

        They are similar to the engine that it names, and need not exist. () if there is no choice.
        """
        ...

    def unusable_reason(self, device: Device) -> str:
        """Why no call at all can run on this device here; empty if some can."""
        ...

    def version(self) -> tuple[str, str] | None:
        """The vendor's library and its version; None without one."""
        ...

    def library_lines(self) -> list[str]:
        """The state of the vendor's library on this machine, for `attn-dispatch info`."""
        ...

    def forward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """out and the other results that `spec.results` lists, in its order."""
        ...

    def backward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """The gradients that `spec.wanted.gradients` lists, in its order."""
        ...


@runtime_checkable
class SkipsInvalidRows(Protocol):
    """An implementation whose backward kernels may leave out the rows that are invalid."""

    def skips_invalid_rows(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether the backward pass of this call reads nothing of invalid rows.

        Their lse may then be NaN, instead of -inf.
        """
        ...


@runtime_checkable
class ComputesTangents(Protocol):
    """An implementation that has kernels of a call's forward-mode derivative.

    Its `not_supported_reasons` are then also asked about specs that want FORWARD_MODE.
    """

    def tangents(
        self,
        spec: AttentionSpec,
        device: Device,
        operands: Mapping[str, jax.Array],
        moved: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """The tangents of out and lse.

        Args:
          spec: the forward call, which wants the derivative.
          device: the device that it is lowered for.
          operands: its operands, out and lse.
          moved: the tangents of operands; a missing one is 0.
        """
        ...
