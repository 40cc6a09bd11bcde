"""NVIDIA: FlashAttention-4's kernels, once `attn-dispatch build-fa4` has compiled them.

They take a mask as data: at most two intervals of keys for each query, or else a bit for each pair,
and lists of the tiles that some query sees. No other tile is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax

from attn_dispatch.call.options import FORWARD_MODE
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import (
    Plan,
    device_reason,
    library_reason,
    platform_reasons,
)
from attn_dispatch.fa4 import compiled, passes, rules, tangent_calls, wide_calls
from attn_dispatch.fa4.call import kernels_for, tiles_of
from attn_dispatch.fa4.compiled import (
    BACKWARD_TARGET,
    FORWARD_TARGET,
    CompiledLibrary,
    KernelSet,
    register,
)
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.tile_lists import TileSizes

NAME = "fa4"
PLATFORM = "cuda"
IS_EXTRA = True
KEEPS_NAN_APART = False
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = False
SKIPS_FROM_BOTTOM_RIGHT = True

__all__ = ["BACKWARD_TARGET", "FORWARD_TARGET", "register"]

_ARCHS = ("sm90", "sm100")
_NEVER_RUN = ("sm100",)
"""Kernels for these have been compiled, but nobody has run one."""


@dataclass(frozen=True)
class _Family:
    """One family of compiled kernels: what it does not run, which set runs a call, and its plan."""

    not_supported_reasons: Callable[[AttentionSpec, CompiledLibrary], tuple[Reason, ...]]
    kernels_for: Callable[[AttentionSpec, CompiledLibrary], KernelSet | None]
    plan: Callable[[AttentionSpec, KernelSet], Plan]

    @staticmethod
    def of(spec: AttentionSpec) -> _Family:
        if spec.wanted.derivative == FORWARD_MODE:
            return _TANGENT
        return _WIDE if wide_calls.is_wide(spec) else _INTERVAL


_INTERVAL = _Family(rules.not_supported_reasons, kernels_for, passes.plan)
_WIDE = _Family(wide_calls.not_supported_reasons, wide_calls.kernels_for, wide_calls.plan)
_TANGENT = _Family(
    tangent_calls.not_supported_reasons, tangent_calls.kernels_for, tangent_calls.plan
)


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    library, reasons = compiled.find(), _device_reasons(device)
    if not reasons:
        library, reasons = library.on(device.arch), _proof_reasons(spec, device)
    return (*reasons, *_Family.of(spec).not_supported_reasons(spec, library))


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel and its scratch memory in bytes."""
    found = _Family.of(spec).plan(spec, _kernels(spec, device))
    engine = f"FlashAttention-4 ({compiled.find().versions}), {found.engine}"
    if device.arch in _NEVER_RUN:
        engine += f"; {_never_run(device)}"
    return replace(found, engine=engine)


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def unusable_reason(device: Device) -> str:
    return "; ".join(x.with_remedy for x in _device_reasons(device))


def version() -> tuple[str, str] | None:
    library = compiled.find()
    return (NAME, library.versions) if library.is_usable else None


def library_lines() -> list[str]:
    library = compiled.find()
    if not library.is_usable:
        return [library.unusable_reason]
    archs = dict.fromkeys(x.arch for x in library.sets)
    sets = "; ".join(f"{x}: {compiled.names(library.on(x).sets)}" for x in archs)
    return [f"{library.versions}, {sets} ({library.path})"]


def mask_tiles(spec: AttentionSpec, device: Device) -> TileSizes | None:
    """The tiles in which the kernels take the call's mask; None if they take none, or do not run
    the call."""
    if wide_calls.is_wide(spec) or not_supported_reasons(spec, device):
        return None
    return _tile(spec, device)


def forward(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    mask: MaskArrays | None = None,
) -> tuple[jax.Array, ...]:
    _register(device)
    if wide_calls.is_wide(spec):
        return wide_calls.forward(spec, _kernels(spec, device), operands)
    return passes.forward(spec, operands, _mask(spec, device, operands, mask), device.arch)


def backward(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    mask: MaskArrays | None = None,
) -> tuple[jax.Array, ...]:
    _register(device)
    if wide_calls.is_wide(spec):
        return wide_calls.backward(spec, _kernels(spec, device), operands)
    return passes.backward(spec, operands, _mask(spec, device, operands, mask), device.arch)


def tangents(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    moved: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse (tangent_calls.py)."""
    _register(device)
    return tangent_calls.tangents(spec, _kernels(spec, device), operands, moved)


def _mask(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    given: MaskArrays | None,
) -> MaskArrays:
    """The given arrays of the call's mask, or new ones if there are none of the kernels' tiles."""
    tile = _tile(spec, device)
    if given is not None and given.tile == tile:
        return given
    return MaskArrays.of(spec, operands, tile)


def _kernels(spec: AttentionSpec, device: Device, family: _Family | None = None) -> KernelSet:
    family = family or _Family.of(spec)
    found = family.kernels_for(spec, compiled.find().on(device.arch))
    assert found is not None  # or it would be a reason
    return found


def _tile(spec: AttentionSpec, device: Device) -> TileSizes:
    tiles = tiles_of(_kernels(spec, device, _INTERVAL))
    return tiles.backward if spec.is_backward else tiles.forward


def _register(device: Device) -> None:
    if device.is_present:
        register()


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if elsewhere := platform_reasons("FlashAttention", PLATFORM, device):
        return elsewhere
    reasons: list[Reason] = []
    if device.arch not in _ARCHS:
        why = f"kernels are compiled for {' and '.join(_ARCHS)}, and this is {device}"
        reasons.append(device_reason("arch", device, why))
    library = compiled.find()
    if not library.is_usable:
        reasons.append(library_reason("fa4/library", library.unusable_reason))
    elif not reasons and not library.on(device.arch).sets:
        command = compiled.build_command(device.arch)
        state = f"FlashAttention-4's kernels are not compiled for {device.arch}: run {command}"
        reasons.append(library_reason("fa4/arch", state))
    return tuple(reasons)


def _proof_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """The reason against kernels that have never run on such a GPU, unless the caller asks for them
    by name."""
    if device.arch not in _NEVER_RUN or NAME in spec.meaning.implementation:
        return ()
    why = f"{_never_run(device)}; they run calls that name them"
    return (Reason("fa4/never_run", (("arch", device.arch),), why, f'implementation="{NAME}"'),)


def _never_run(device: Device) -> str:
    return f"these kernels have been compiled for {device.arch}, but never run there"
