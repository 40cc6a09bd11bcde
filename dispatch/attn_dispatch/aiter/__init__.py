"""AMD: AITER's CK and ASM attention kernels. The `_rocm` library runs them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import kernels as aiter_kernels
from attn_dispatch.aiter import library as aiter_library
from attn_dispatch.aiter.arrays import (
    Buffers,
    KernelArrays,
    Sequences,
    backward_results,
    forward_results,
    from_rows,
    inputs,
    lse_from_rows,
    lse_to_rows,
    rounded_dq,
    split_results,
    sum_groups,
    sum_to_bias,
    to_rows,
    where_real,
    workspace_bytes,
)
from attn_dispatch.aiter.call import AiterCall, call_for
from attn_dispatch.aiter.call_rules import call_reasons
from attn_dispatch.aiter.kernels import Kernel
from attn_dispatch.aiter.release import Release
from attn_dispatch.aiter.split_kv import split_inputs, split_outputs
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import (
    Plan,
    library_reason,
    platform_reasons,
    require_arch,
)
from attn_dispatch.reason import Reason, sentences
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.lse_grad import with_lse_grad
from attn_dispatch.semantics.real_rows import each_query_attends
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last, padded_bytes
from attn_dispatch.warning import AttentionKernelWarning, warn_once

NAME = "aiter"
PLATFORM = "rocm"
IS_EXTRA = False
KEEPS_NAN_APART = True
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = True
SKIPS_FROM_BOTTOM_RIGHT = True
FORWARD_TARGET = "attn_dispatch_aiter_forward"
BACKWARD_TARGET = "attn_dispatch_aiter_backward"
SPLIT_KV_TARGET = FORWARD_TARGET + "_split_kv"


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Every limit of this version and of AITER's kernels that the call exceeds."""
    reasons = (*_device_reasons(device), *call_reasons(spec))
    if spec.dtype in ("float16", "bfloat16") and device.platform == "rocm":
        reasons += _kernel_reasons(spec, device)
    return tuple(dict.fromkeys(reasons))


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The kernel, CK or ASM, and the scratch memory in bytes."""
    call, kernel = _kernel(spec, device)
    engine = str(kernel)
    if kernel.why_not_asm:
        engine += f" (not asm: {'; '.join(x.with_remedy for x in kernel.why_not_asm)})"
    if kernel.doubts:
        engine += f" (in doubt: {'; '.join(x.with_remedy for x in kernel.doubts)})"
    if kernel.release.doubt:
        engine += f" ({kernel.release.doubt})"
    copies = padded_bytes(spec, call.head_dim, call.head_dim_v)
    return Plan(engine, workspace_bytes(call, kernel), copies)


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def unusable_reason(device: Device) -> str:
    return sentences(_device_reasons(device))


def version() -> tuple[str, str]:
    return "AITER", aiter_folder.version()


def library_lines() -> list[str]:
    """One line for each build of AITER that is used here, or the folder searched."""
    lines: list[str] = []
    places = [(x, y) for x in aiter_folder.ARCHS for y in aiter_folder.releases(x)]
    for arch, release in places:
        folder = aiter_folder.folder_of(release, arch)
        try:
            build = aiter_folder.read(folder)
        except ValueError as error:
            lines.append(f"AITER for {arch}: {error}")
            continue
        if build:
            kind = ", to check that it compiles" if build.compile_check_only else ""
            lines.append(f"AITER {build.wheel_version} for {arch}{kind} [{folder}]")
    return lines or [f"AITER: not built here [{aiter_folder.root()}]"]


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call, kernel = _kernel(spec, device)
    sequences = _sequences(spec, kernel, call, operands)
    lse = None
    if call.is_split:
        arrays = split_inputs(spec, call, operands)
        buffers = split_results(call, kernel.num_splits)
        results = _call(SPLIT_KV_TARGET, spec, device, kernel, arrays, buffers)
        out, lse = split_outputs(spec, call, operands, results)
    else:
        arrays = inputs(spec, call, operands, sequences)
        results = _call(FORWARD_TARGET, spec, device, kernel, arrays, forward_results(call))
        out = from_rows(results["out"], spec.batch)[..., : spec.head_dim_v]
        if spec.wanted.needs_lse:
            lse = lse_from_rows(results["lse"], spec)
    found = {"out": where_real(sequences.real_queries, out, 0)}
    if lse is not None:
        if sequences.real_queries is not None:
            lse = jnp.where(sequences.real_queries[:, None, :], lse, -jnp.inf)
        found["lse"] = lse
    return tuple(nan_where_invalid(spec, operands, found).values())


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call, kernel = _kernel(spec, device)
    sequences = _sequences(spec, kernel, call, operands)
    arrays = inputs(spec, call, operands, sequences)
    lse = operands["lse"]
    if not each_query_attends(spec):
        # exp(-inf - lse) must be 0, however the kernel treats an lse of -inf.
        lse = jnp.where(lse == -jnp.inf, 0, lse)
    out, out_grad = operands["out"], operands["out_grad"]
    if spec.has("lse_grad"):
        out, out_grad = with_lse_grad(out, out_grad, operands["lse"], operands["lse_grad"])
    arrays["out"] = to_rows(pad_last(out, call.head_dim_v), call)
    arrays["lse"] = lse_to_rows(lse, call)
    arrays["out_grad"] = to_rows(pad_last(out_grad, call.head_dim_v), call)
    buffers = backward_results(call, kernel)
    results = _call(BACKWARD_TARGET, spec, device, kernel, arrays, buffers)
    if not kernel.rounds_dq:
        results["dq"] = rounded_dq(results["dq_acc"], spec.dtype)
    dq, dk, dv = (from_rows(results[name], spec.batch) for name in ("dq", "dk", "dv"))
    gradients = {
        "query": scaled_query(
            spec, where_real(sequences.real_queries, dq, 0)[..., : spec.head_dim]
        ),
        "key": where_real(sequences.real_keys, sum_groups(spec, dk)[..., : spec.head_dim], 0),
        "value": where_real(sequences.real_keys, sum_groups(spec, dv)[..., : spec.head_dim_v], 0),
    }
    if call.has_dbias:
        gradients["bias"] = sum_to_bias(spec, results["dbias"])
    return tuple(gradients[name] for name in spec.wanted.gradients)


@lru_cache(maxsize=8)
def register(arch: str) -> None:
    """Register the custom calls with XLA. Lowering for a device that is present does so itself.

    Only a process that runs an exported module without ever calling attention needs this.

    Args:
      arch: the architecture of the devices, "gfx942" or "gfx950".

    Raises:
      RuntimeError: if the ROCm library or AITER is not usable, with the reason.
    """
    library, *_ = [aiter_library.find(arch, x) for x in aiter_folder.releases(arch)]
    if library.backend is None:
        raise RuntimeError(library.unusable_reason)
    register_handlers(library.backend, "ROCM")


def register_handlers(backend: ModuleType, platform: str) -> None:
    """Register the handlers of a `_rocm` module as custom calls of this XLA platform."""
    jax.ffi.register_ffi_type("attn_dispatch_aiter_call_site", backend.state_type(), platform)
    for target, stages in (
        (FORWARD_TARGET, backend.forward_handlers()),
        (BACKWARD_TARGET, backend.backward_handlers()),
        (SPLIT_KV_TARGET, backend.split_kv_handlers()),
    ):
        jax.ffi.register_ffi_target(target, stages, platform=platform)


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if elsewhere := platform_reasons("AITER", PLATFORM, device):
        return elsewhere
    require_arch(device)
    reasons = aiter_kernels.unsupported_arch(device.arch)
    return reasons or _library_reasons(device, aiter_folder.release(device.arch))


def _library_reasons(device: Device, release: Release) -> tuple[Reason, ...]:
    """Why a release that is built for a device cannot be used there."""
    why = aiter_library.find(device.arch, release).unusable_reason if device.is_present else ""
    return (library_reason("aiter/library", why),) if why else ()


def _kernel_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Why no release runs a call: the reasons against the last that can be used, which runs the
    most calls."""
    releases = aiter_folder.releases_for(device)
    call = call_for(spec, device.arch, releases[-1])
    reasons = aiter_kernels.not_supported_reasons(call, device.arch, releases[0])
    for other in releases[1:] if reasons else ():
        if why_not_here := _library_reasons(device, other):
            return (*reasons, *why_not_here)
        reasons = aiter_kernels.not_supported_reasons(call, device.arch, other)
    return reasons


def _sequences(
    spec: AttentionSpec, kernel: Kernel, call: AiterCall, operands: Mapping[str, jax.Array]
) -> Sequences:
    return Sequences.of(spec, call, operands, as_prefix_sums=kernel.release.takes_prefix_sums)


def _kernel(spec: AttentionSpec, device: Device) -> tuple[AiterCall, Kernel]:
    releases = aiter_folder.releases_for(device)
    call = call_for(spec, device.arch, releases[-1])
    return call, aiter_kernels.kernel_of_first(call, device.arch, releases)


def _call(
    target: str,
    spec: AttentionSpec,
    device: Device,
    kernel: Kernel,
    arrays: KernelArrays,
    results: Buffers,
) -> KernelArrays:
    if device.is_present:
        register(device.arch)
    for doubt in kernel.doubts:
        warn_once(doubt.with_remedy, AttentionKernelWarning)
    call = jax.ffi.ffi_call(target, list(results.values()))
    attributes = _attributes(spec, _kernel(spec, device)[0], kernel, device)
    return dict(zip(results, call(*arrays.values(), **attributes), strict=True))


def _attributes(
    spec: AttentionSpec, call: AiterCall, kernel: Kernel, device: Device
) -> dict[str, bool | str | np.generic]:
    """The custom call's attributes, name for name as ATTN_AITER_SPEC of rocm_backend/spec.h."""
    return {
        "arch": device.arch,
        "generation": kernel.release.generation,
        "max_seq_len_q": np.int64(call.max_seq_len_q),
        "max_seq_len_kv": np.int64(call.max_seq_len_kv),
        "has_gaps": call.has_gaps,
        "scale": np.float32(positive_scale(spec)),
        "logits_soft_cap": np.float32(call.logits_soft_cap),
        "dropout_rate": np.float32(call.dropout_rate),
        "mask": call.mask,
        "window_left": np.int64(call.window_left),
        "window_right": np.int64(call.window_right),
        "bias": call.bias,
        "use_asm": kernel.family == "asm",
        "bf16_rounding": np.int64(kernel.bf16_rounding),
        "needs_lse": call.needs_lse,
        "accumulator": kernel.accumulator,
        # ASM is where it can be, and is not asked: AITER would refuse.
        "deterministic": call.deterministic and kernel.family == "ck",
        "has_dbias": call.has_dbias,
        "is_paged": call.page_size > 0,
        "heads_first_kv": call.heads_first_kv,
        "value_page": np.int64(call.value_page),
        "num_splits": np.int64(kernel.num_splits),
    }
