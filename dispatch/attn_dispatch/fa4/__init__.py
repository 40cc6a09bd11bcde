"""NVIDIA: FlashAttention-4's kernels, once `attn-dispatch build-fa4` has compiled them.

They take a mask as data: at most two intervals of keys for each query, or else a bit for each pair,
and lists of the tiles that some query sees. No other tile is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from attn_dispatch.call.options import FORWARD_MODE
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan, device_reason, library_reason
from attn_dispatch.fa4 import compiled, interval_calls, passes, rules, tangent_calls, wide_calls
from attn_dispatch.fa4.call import kernels_for, tiles_of
from attn_dispatch.fa4.compiled import (
    BACKWARD_TARGET,
    FORWARD_TARGET,
    CompiledLibrary,
    KernelSet,
    register,
)
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.interval_plan import lists_bytes
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.mask_data import data_bytes
from attn_dispatch.semantics.tile_lists import TileSizes
from attn_dispatch.semantics.wider_arrays import padded_bytes

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


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    library, reasons = compiled.find(), _device_reasons(device)
    if not reasons:
        library, reasons = library.on(device.arch), _proof_reasons(spec, device)
    return (*reasons, *_rules_of(spec)(spec, library))


def _rules_of(
    spec: AttentionSpec,
) -> Callable[[AttentionSpec, CompiledLibrary], tuple[Reason, ...]]:
    if spec.wanted.derivative == FORWARD_MODE:
        return tangent_calls.not_supported_reasons
    return (wide_calls if wide_calls.is_wide(spec) else rules).not_supported_reasons


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel and its scratch memory in bytes."""
    if spec.wanted.derivative == FORWARD_MODE:
        return _tangent_plan(spec, device)
    if wide_calls.is_wide(spec):
        return _wide_plan(spec, device)
    kernels = _kernels(spec, device)
    head_dim = f"head dim {kernels.head_dim}"
    if kernels.head_dim_v != kernels.head_dim:
        head_dim += f"/{kernels.head_dim_v}"
    engine = f"FlashAttention-4 ({compiled.find().versions}), {head_dim}"
    if not has_intervals(spec):
        engine += ", mask of a bit a pair"
    if device.arch in _NEVER_RUN:
        engine += f"; {_never_run(device)}"
    query, key = (jax.ShapeDtypeStruct(spec.shape(x), spec.dtype) for x in ("query", "key"))
    scratch = interval_calls.scratch_bytes(kernels, query, key) if spec.is_backward else 0
    mask = data_bytes(spec) + lists_bytes(spec, tiles_of(kernels))[int(spec.is_backward)]
    copies = padded_bytes(spec, kernels.head_dim, kernels.head_dim_v)
    return Plan(engine, scratch, mask + copies)


def _tangent_plan(spec: AttentionSpec, device: Device) -> Plan:
    kernels = _tangent_kernels(spec, device)
    engine = f"FlashAttention-4 ({compiled.find().versions}), kernel of the derivative"
    mask = data_bytes(spec) + lists_bytes(spec, tangent_calls.tiles_of(kernels))[0]
    # Tangents have copies as well.
    return Plan(engine, 0, mask + 2 * padded_bytes(spec, kernels.head_dim, kernels.head_dim_v))


def _wide_plan(spec: AttentionSpec, device: Device) -> Plan:
    kernels, columns = _wide_kernels(spec, device), wide_calls.columns(spec)
    engine = f"FlashAttention-4 ({compiled.find().versions}), head dims up to {kernels.head_dim}"
    scratch = wide_calls.scratch_bytes(spec, kernels) if spec.is_backward else 0
    return Plan(engine, 0, scratch + padded_bytes(spec, columns, columns))


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
        return wide_calls.forward(spec, _wide_kernels(spec, device), operands)
    return passes.forward(spec, operands, _mask(spec, device, operands, mask), device.arch)


def backward(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    mask: MaskArrays | None = None,
) -> tuple[jax.Array, ...]:
    _register(device)
    if wide_calls.is_wide(spec):
        return wide_calls.backward(spec, _wide_kernels(spec, device), operands)
    return passes.backward(spec, operands, _mask(spec, device, operands, mask), device.arch)


def tangents(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    moved: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse (tangent_calls.py)."""
    _register(device)
    return tangent_calls.tangents(spec, _tangent_kernels(spec, device), operands, moved)


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


def _kernels(spec: AttentionSpec, device: Device) -> KernelSet:
    found = kernels_for(spec, compiled.find().on(device.arch))
    assert found is not None  # or it would be a reason
    return found


def _tangent_kernels(spec: AttentionSpec, device: Device) -> KernelSet:
    found = tangent_calls.kernels_for(spec, compiled.find().on(device.arch))
    assert found is not None  # or it would be a reason
    return found


def _wide_kernels(spec: AttentionSpec, device: Device) -> KernelSet:
    found = wide_calls.kernels_for(spec, compiled.find().on(device.arch))
    assert found is not None  # or it would be a reason
    return found


def _tile(spec: AttentionSpec, device: Device) -> TileSizes:
    tiles = tiles_of(_kernels(spec, device))
    return tiles.backward if spec.is_backward else tiles.forward


def _register(device: Device) -> None:
    if device.is_present:
        register()


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if device.platform != "cuda":
        why = f"FlashAttention runs on NVIDIA GPUs, and this is {device}"
        return (device_reason("platform", device, why),)
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
