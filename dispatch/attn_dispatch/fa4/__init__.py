"""NVIDIA: FlashAttention-4's kernels, if the package fa4-jax is installed."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan, device_reason, library_reason
from attn_dispatch.fa4 import kernels, library, rules
from attn_dispatch.fa4.call import call_of
from attn_dispatch.flash import clear_rows, passes
from attn_dispatch.flash.call import offsets_count
from attn_dispatch.reason import Reason, Rule

NAME = "fa4"
PLATFORM = "cuda"
IS_EXTRA = True
KEEPS_NAN_APART = False
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = False
SKIPS_FROM_BOTTOM_RIGHT = True

_ARCHS = ("sm90", "sm100")

_EXPORT = Rule[Device](
    "fa4/export",
    lambda device: device.is_present and settings.current().is_exporting,
    "its kernels are compiled in this process, and another could not run the module",
)


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    return (*_device_reasons(device), *rules.not_supported_reasons(spec, device))


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel and its scratch memory in bytes."""
    call = call_of(spec)
    packed = ", packed" if call.is_packed else ""
    head_dim = f"head dim {call.head_dim}"
    if call.head_dim_v != call.head_dim:
        head_dim += f"/{call.head_dim_v}"
    engine = f"FlashAttention-4 (fa4-jax {library.version()}), {head_dim}{packed}"
    sequences = offsets_count(call) - 1 if call.is_packed else call.batch
    workspace_bytes = kernels.workspace_bytes(call, sequences)
    return Plan(engine, workspace_bytes, passes.copies_bytes(spec, call))


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def unusable_reason(device: Device) -> str:
    return "; ".join(x.with_remedy for x in _device_reasons(device))


def version() -> tuple[str, str] | None:
    found = library.version()
    return None if found is None else (library.NAME, found)


def library_lines() -> list[str]:
    reason = library.unusable_reason()
    return [reason.with_remedy if reason else f"{library.NAME}: {library.version()}"]


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    clear_rows.register()
    return passes.forward(spec, call_of(spec), operands, kernels)


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    clear_rows.register()
    return passes.backward(spec, call_of(spec), operands, kernels)


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if device.platform != "cuda":
        why = f"FlashAttention runs on NVIDIA GPUs, and this is {device}"
        return (device_reason("platform", device, why),)
    reasons: list[Reason] = []
    if device.arch not in _ARCHS:
        why = f"runs on {' and '.join(_ARCHS)} in this version, and this is {device}"
        reasons.append(device_reason("arch", device, why))
    if why := library.unusable_reason():
        reasons.append(why)
    if not device.is_present:
        why = "its kernels are compiled on the GPU that runs them, which is not present"
        reasons.append(device_reason("absent", device, why))
    elif _EXPORT.applies(device):
        reasons.append(_EXPORT.reason(device))
    elif not reasons and (why := library.loading_failure()):
        reasons.append(library_reason("fa4/loading", why))
    return tuple(reasons)
