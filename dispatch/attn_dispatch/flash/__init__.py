"""NVIDIA: FlashAttention-3's kernels, where the package dew-flash-attn brings them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.flash import clear_rows, kernels, library, rules
from attn_dispatch.flash.arrays import from_kernel, lse_from_kernel, lse_to_kernel, to_kernel
from attn_dispatch.flash.call import call_of
from attn_dispatch.flash.clear_rows import flags_of
from attn_dispatch.flash.library import BACKWARD_TARGET, FORWARD_TARGET
from attn_dispatch.flash.sequences import Sequences
from attn_dispatch.semantics.live import each_query_attends
from attn_dispatch.semantics.lse_grad import with_lse_grad
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.wrong import marked

NAME = "flash"
PLATFORM = "cuda"
IS_EXTRA = True
KEEPS_NAN_APART = False
DROPS_BY_POSITION = False

__all__ = ["BACKWARD_TARGET", "FORWARD_TARGET"]

_ARCHS = ("sm90",)


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return (*_unusable(device), *rules.not_supported_reasons(spec))


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
    return None if found is None else ("dew-flash-attn", found)


def library_lines() -> list[str]:
    return [f"dew-flash-attn: {library.version() or library.unusable_reason()}"]


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call = call_of(spec)
    sequences = Sequences.of(spec, call, operands)
    live = sequences.live_queries
    qkv = (
        # Whatever a masked score is, it is masked: NaN in padding comes by value alone.
        to_kernel(call, scaled_query(spec, operands["query"]), None),
        to_kernel(call, operands["key"], None),
        to_kernel(call, operands["value"], sequences.live_keys),
    )
    _register(device)
    out, lse = kernels.forward(call, qkv, sequences.offsets, positive_scale(spec))
    flags = None if live is None else flags_of(spec, operands, live)
    found = {"out": from_kernel(call, out, flags, spec.head_dim_v)}
    if spec.options.needs_lse:
        lse = lse_from_kernel(call, lse)
        if live is not None:
            lse = jnp.where(live[:, None, :], lse, -jnp.inf)
        found |= marked(spec, operands, {"lse": lse})
    return tuple(found.values())


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call = call_of(spec)
    sequences = Sequences.of(spec, call, operands)
    of_queries, of_keys = sequences.live_queries, sequences.live_keys
    out, out_grad = operands["out"], operands["out_grad"]
    if spec.has("lse_grad"):
        out, out_grad = with_lse_grad(out, out_grad, operands["lse"], operands["lse_grad"])
    lse = operands["lse"]
    if not each_query_attends(spec):
        # exp(-inf - lse) must be 0 whatever the kernel makes of an lse of -inf.
        lse = jnp.where(lse == -jnp.inf, 0, lse)
    arrays = (
        to_kernel(call, out_grad, of_queries),
        to_kernel(call, scaled_query(spec, operands["query"]), of_queries),
        to_kernel(call, operands["key"], of_keys),
        to_kernel(call, operands["value"], of_keys),
        to_kernel(call, out, None),
        lse_to_kernel(call, lse),
    )
    _register(device)
    dq, dk, dv = kernels.backward(call, arrays, sequences.offsets, positive_scale(spec))
    gradients = {
        "query": scaled_query(spec, from_kernel(call, dq, of_queries, spec.head_dim)),
        "key": from_kernel(call, dk, of_keys, spec.head_dim),
        "value": from_kernel(call, dv, of_keys, spec.head_dim_v),
    }
    return tuple(gradients[name] for name in spec.options.gradients)


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
