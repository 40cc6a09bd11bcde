"""NVIDIA: the kernels of FlashAttention-2 and -3, if the package dew-flash-attn is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import (
    Plan,
    device_reason,
    library_reason,
    platform_reasons,
)
from attn_dispatch.flash import kernels, library, passes, rules
from attn_dispatch.flash.call import FlashCall, call_of, lies_end_to_end
from attn_dispatch.flash.generations import (
    ALL,
    ARCHS,
    BACKWARD_TARGET,
    FORWARD_TARGET,
    Generation,
    generation_of,
)
from attn_dispatch.reason import Reason
from attn_dispatch.typed_jax import local_devices

NAME = "flash"
PLATFORM = "cuda"
IS_EXTRA = True
KEEPS_NAN_APART = False
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = False
SKIPS_FROM_BOTTOM_RIGHT = True

__all__ = ["BACKWARD_TARGET", "FORWARD_TARGET"]

_MULTIPROCESSORS = "multiProcessorCount"
"""The only one of cuDNN's device properties that is read here."""


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    generation = generation_of(device.arch)
    reasons = rules.not_supported_reasons(spec, generation, device.arch)
    return (*_device_reasons(device), *reasons)


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel and its scratch memory in bytes."""
    call = _call(spec, device)
    generation = call.generation
    packed = ", packed" if call.is_packed else ""
    note = f" ({generation.note})" if generation.note else ""
    engine = f"{generation.name} (dew-flash-attn {library.version()}), head dim {call.head_dim}"
    copies = passes.copies_bytes(spec, call)
    return Plan(engine + packed + note, kernels.workspace_bytes(call), copies)


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def skips_invalid_rows(spec: AttentionSpec, device: Device) -> bool:
    return lies_end_to_end(spec, generation_of(device.arch))


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
    _register(device)
    return passes.forward(spec, _call(spec, device), operands)


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    _register(device)
    return passes.backward(spec, _call(spec, device), operands)


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom calls with XLA. Lowering for a device that is present does so itself.

    Only a process that runs an exported module without ever calling attention needs this.

    Raises:
      RuntimeError: if dew-flash-attn is not usable, with the reason.
    """
    generations = [x for x in ALL if x.archs and set(x.archs) & _archs_here()]
    for generation in generations or ALL[:1]:
        _register_generation(generation)


def _register_generation(generation: Generation) -> None:
    if reason := library.unusable_reason() or library.loading_failure(generation):
        raise RuntimeError(reason.with_remedy if isinstance(reason, Reason) else reason)
    library.register(generation)
    clear_rows.register()


def _register(device: Device) -> None:
    if device.is_present:
        _register_generation(generation_of(device.arch))


def _archs_here() -> set[str]:
    """The archs of the GPUs in this process."""
    gpus = (x for x in local_devices() if hasattr(x, "compute_capability"))
    return {f"sm{x.compute_capability.replace('.', '')}" for x in gpus}


def _call(spec: AttentionSpec, device: Device) -> FlashCall:
    generation = generation_of(device.arch)
    return call_of(spec, generation, _multiprocessors(device))


def _multiprocessors(device: Device) -> int:
    if device.properties is not None:
        return json.loads(device.properties)[_MULTIPROCESSORS]
    here = (x for x in local_devices() if x.local_hardware_id == device.ordinal)
    return next((x.core_count for x in here if hasattr(x, "core_count")), 1)


def _loading_failure(device: Device) -> str:
    return library.loading_failure(generation_of(device.arch))


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if elsewhere := platform_reasons("FlashAttention", PLATFORM, device):
        return elsewhere
    reasons: list[Reason] = []
    if device.arch not in ARCHS:
        why = f"runs on {', '.join(sorted(ARCHS))} in this version, and this is {device}"
        reasons.append(device_reason("arch", device, why))
    if device.properties is not None and _MULTIPROCESSORS not in json.loads(device.properties):
        why = f"needs the target's {_MULTIPROCESSORS}, which its properties do not have"
        reasons.append(device_reason("properties", device, why))
    if why := library.unusable_reason():
        reasons.append(why)
    elif device.is_present and not reasons and (why := _loading_failure(device)):
        reasons.append(library_reason("flash/loading", why))
    return tuple(reasons)
