"""NVIDIA: cuDNN's fused attention, planned and run by the `_cuda` library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import cudnn_library
from attn_dispatch.device import UNKNOWN_ARCH, Device
from attn_dispatch.implementation import Plan
from attn_dispatch.padding import pad_last, prepend, round_up
from attn_dispatch.spec import AttentionSpec

NAME = "cudnn"
PLATFORM = "cuda"
FORWARD_TARGET = "attn_dispatch_cudnn_forward"
BACKWARD_TARGET = "attn_dispatch_cudnn_backward"

_HEAD_DIM_MULTIPLE = 8  # strides must be multiples of 16 bytes (cudnn-frontend issue 1571)
_OLDEST_SM = 80


@dataclass(frozen=True)
class _Attributes:
    """The custom call's attributes: field for field ATTN_SDPA_SPEC of cuda_backend/spec.h."""

    backward: bool
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    is_causal: bool
    bottom_right: bool
    full_lengths: bool
    needs_lse: bool


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    """This version's own limits first; cuDNN itself is asked only where there are none."""
    reasons = [*_unsupported_device(device), *_unsupported_options(spec)]
    if reasons:
        return tuple(reasons)
    planned = _planned(spec, device)
    return () if isinstance(planned, _Planned) else (planned,)


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """cuDNN's engine with its knobs, and the workspace of the custom call in bytes."""
    planned = _planned(spec, device)
    if isinstance(planned, str):
        raise NotImplementedError(planned)
    return planned.plan


def unusable_reason(device: Device) -> str:
    return "; ".join(_unsupported_device(device))


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    dead = _dead_rows(spec)
    q, k, v = _padded(operands["query"][:, dead:], operands["key"], operands["value"])
    b, t, n, _ = q.shape
    results = [jax.ShapeDtypeStruct((b, t, n, v.shape[-1]), q.dtype)]
    if spec.options.needs_lse:
        results.append(jax.ShapeDtypeStruct((b, n, t), jnp.float32))
    out, *lse = _call(FORWARD_TARGET, spec, device, (q, k, v), results)
    out = prepend(out[..., : spec.head_dim_v], dead, axis=1, value=0)
    return (out, *(prepend(x, dead, axis=2, value=-np.inf) for x in lse))


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    dead = _dead_rows(spec)
    names = ("query", "key", "value", "out", "out_grad")
    rows = {name: operands[name][:, dead:] for name in ("query", "out", "out_grad")}
    q, k, v, out, out_grad = _padded(*(rows.get(name, operands[name]) for name in names))
    lse = operands["lse"][:, :, dead:]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    dq, dk, dv = _call(BACKWARD_TARGET, spec, device, (q, k, v, out, lse, out_grad), results)
    gradients = {
        "query": prepend(dq[..., : spec.head_dim], dead, axis=1, value=0),
        "key": dk[..., : spec.head_dim],
        "value": dv[..., : spec.head_dim_v],
    }
    return tuple(gradients[name] for name in spec.options.gradients)


@lru_cache(maxsize=1)
def register() -> None:
    """Make the custom calls known to XLA; lowering does so by itself.

    Only a process that runs an exported module without ever calling attention needs it.

    Raises:
      RuntimeError: if the CUDA library or cuDNN is not usable, with the reason.
    """
    backend = _backend()
    stages, state = backend.ffi_handlers(), backend.ffi_state_type()
    jax.ffi.register_ffi_type("attn_dispatch_cudnn_call_site", state, platform="CUDA")
    for target in (FORWARD_TARGET, BACKWARD_TARGET):
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")


def _unsupported_device(device: Device) -> list[str]:
    if device.platform != "cuda":
        return [f"cuDNN runs on NVIDIA GPUs, and this is {device}"]
    if device.arch == UNKNOWN_ARCH:
        raise RuntimeError(
            "attn_dispatch is lowering for cuda, and there is neither a CUDA device here nor a "
            'target to plan for. Name one: `with attn_dispatch.target("sm90"):` around the '
            "lowering, or ATTN_DISPATCH_TARGET=sm90 in the environment."
        )
    reasons = []
    if int(device.arch[2:]) < _OLDEST_SM:
        reasons.append(f"needs compute capability sm{_OLDEST_SM} or newer, and this is {device}")
    if unusable := cudnn_library.find().unusable:
        reasons.append(unusable)
    return reasons


def _unsupported_options(spec: AttentionSpec) -> list[str]:
    o = spec.options
    not_run = {
        "bias": spec.has("bias"),
        "mask": spec.has("mask"),
        "query_seq_lengths and key_value_seq_lengths": spec.has("query_seq_lengths")
        or spec.has("key_value_seq_lengths"),
        "segment ids": spec.has("query_segment_ids"),
        "packed sequences": spec.has("cu_seqlens_q"),
        "local_window_size": o.window != (None, None),
        "logits_soft_cap": o.logits_soft_cap is not None,
        "alibi_slopes": spec.has("alibi_slopes"),
        "sinks": spec.has("sinks"),
        "dropout": o.dropout_rate > 0,
        "score_mod": o.score_mod is not None,
        "a deterministic backward pass": o.deterministic and spec.is_backward,
        "the gradient through lse": spec.has("lse_grad"),
    }
    reasons = [f"{x}: not run through cuDNN by this version" for x, yes in not_run.items() if yes]
    if spec.dtype not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16, got {spec.dtype}")
    if spec.is_empty or 0 in (spec.head_dim, spec.head_dim_v):
        reasons.append("an axis has length zero, so there is nothing to compute")
    return reasons


@dataclass(frozen=True)
class _Planned:
    attributes: _Attributes
    plan: Plan


def _planned(spec: AttentionSpec, device: Device) -> _Planned | str:
    """The first variant of the call that cuDNN plans, or why it plans none."""
    backend, refusal = _backend(), ""
    for full_lengths in (False, True):
        attributes = _attributes(spec, full_lengths=full_lengths)
        try:
            engine, workspace_bytes = backend.plan(asdict(attributes), device.properties)
        except backend.CudnnError as error:
            # The padding mask of the second variant steers clear of several known bugs; what
            # it cannot help with is refused for the first reason.
            refusal = refusal or f"{error} (cuDNN {cudnn_library.find().version_text})"
            continue
        return _Planned(attributes, Plan(engine, workspace_bytes))
    return refusal


def _backend() -> ModuleType:
    library = cudnn_library.find()
    if library.backend is None:
        raise RuntimeError(library.unusable)
    return library.backend


def _attributes(spec: AttentionSpec, *, full_lengths: bool) -> _Attributes:
    live_rows = spec.seq_len_q - _dead_rows(spec)
    return _Attributes(
        backward=spec.is_backward,
        dtype=spec.dtype,
        batch=spec.batch,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        seq_len_q=live_rows,
        seq_len_kv=spec.seq_len_kv,
        head_dim=round_up(spec.head_dim, _HEAD_DIM_MULTIPLE),
        head_dim_v=round_up(spec.head_dim_v, _HEAD_DIM_MULTIPLE),
        scale=spec.options.scale,
        is_causal=spec.options.is_causal,
        # Where lengths are equal both alignments mean the same, and top left has fewer limits.
        bottom_right=_is_bottom_right(spec) and live_rows < spec.seq_len_kv,
        full_lengths=full_lengths,
        needs_lse=spec.options.needs_lse and not spec.is_backward,
    )


def _is_bottom_right(spec: AttentionSpec) -> bool:
    return spec.options.is_causal and spec.options.causal_alignment == "bottom_right"


def _dead_rows(spec: AttentionSpec) -> int:
    """How many leading rows attend nothing: cuDNN has no bottom-right mask with them."""
    return max(spec.seq_len_q - spec.seq_len_kv, 0) if _is_bottom_right(spec) else 0


def _padded(*arrays: jax.Array) -> list[jax.Array]:
    return [pad_last(x, round_up(x.shape[-1], _HEAD_DIM_MULTIPLE)) for x in arrays]


def _call(
    target: str,
    spec: AttentionSpec,
    device: Device,
    operands: tuple[jax.Array, ...],
    results: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    register()
    planned = _planned(spec, device)
    if isinstance(planned, str):
        raise NotImplementedError(planned)
    attributes = planned.attributes
    if attributes.full_lengths:
        lengths_q = jnp.full((attributes.batch,), attributes.seq_len_q, jnp.int32)
        lengths_kv = jnp.full((attributes.batch,), attributes.seq_len_kv, jnp.int32)
        operands = (*operands, lengths_q, lengths_kv)
    workspace = jax.ShapeDtypeStruct((planned.plan.workspace_bytes,), jnp.uint8)
    call = jax.ffi.ffi_call(target, [*results, workspace])
    return list(call(*operands, **_ffi_attributes(attributes)))[:-1]


def _ffi_attributes(attributes: _Attributes) -> dict[str, bool | str | np.generic]:
    widths = {int: np.int64, float: np.float32}
    return {
        name: widths.get(type(value), lambda x: x)(value)
        for name, value in asdict(attributes).items()
    }
