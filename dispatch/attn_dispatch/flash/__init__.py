"""NVIDIA: FlashAttention-3's kernels, where the package dew-flash-attn brings them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.flash import clear_rows, kernels, library, passes, rules
from attn_dispatch.flash.call import call_of
from attn_dispatch.flash.library import BACKWARD_TARGET, FORWARD_TARGET

NAME = "flash"
PLATFORM = "cuda"
IS_EXTRA = True
KEEPS_NAN_APART = False
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = False

__all__ = ["BACKWARD_TARGET", "FORWARD_TARGET"]

_ARCHS = ("sm90",)


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return (*_unusable(device), *rules.not_supported_reasons(spec, library.NAME))


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel and its scratch memory in bytes."""
    call = call_of(spec)
    packed = ", packed" if call.is_packed else ""
    engine = f"FlashAttention-3 (dew-flash-attn {library.version()}), head dim {call.head_dim}"
    return Plan(engine + packed, kernels.workspace_bytes(call))


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def unusable_reason(device: Device) -> str:
    return "; ".join(_unusable(device))


def version() -> tuple[str, str] | None:
    found = library.version()
    return None if found is None else (library.NAME, found)


def library_lines() -> list[str]:
    return [f"dew-flash-attn: {library.version() or library.unusable_reason()}"]


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    _register(device)
    return passes.forward(spec, call_of(spec), operands, kernels)


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    _register(device)
    return passes.backward(spec, call_of(spec), operands, kernels)


@lru_cache(maxsize=1)
def register() -> None:
    """Make the custom calls known to XLA; lowering for a device that is here does so by itself.

    Only a process that runs an exported module without ever calling attention needs it.

    Raises:
      RuntimeError: if dew-flash-attn is not usable, with the reason.
    """
    if reason := library.unusable_reason() or library.loading_failure():
        raise RuntimeError(reason)
    library.register()
    clear_rows.register()


def _register(device: Device) -> None:
    if device.is_present:
        register()


def _unusable(device: Device) -> tuple[str, ...]:
    if device.platform != "cuda":
        return (f"FlashAttention runs on NVIDIA GPUs, and this is {device}",)
    reasons = []
    if device.arch not in _ARCHS:
        reasons.append(f"runs on {' and '.join(_ARCHS)} in this version, and this is {device}")
    if reason := library.unusable_reason():
        reasons.append(reason)
    elif device.is_present and not reasons and (failure := library.loading_failure()):
        reasons.append(failure)
    return tuple(reasons)
