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
from attn_dispatch.flash.call import FlashCall, call_of
from attn_dispatch.flash.clear_rows import cleared, flags_of
from attn_dispatch.flash.library import BACKWARD_TARGET, FORWARD_TARGET
from attn_dispatch.flash.sequences import Sequences
from attn_dispatch.semantics.flat_rows import (
    from_rows,
    lse_from_rows,
    lse_to_rows,
    to_rows,
    where_live,
)
from attn_dispatch.semantics.lse_grad import with_lse_grad
from attn_dispatch.semantics.padding import pad_last
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
    inputs = _inputs(spec, call, operands, sequences)
    _register(device)
    out, lse = kernels.forward(call, inputs, sequences.offsets, positive_scale(spec))
    live = sequences.live_queries
    flags = None if live is None else flags_of(spec, operands, live)
    out = _with_others_cleared(call, out, flags)
    found = {"out": from_rows(out, spec.batch)[..., : spec.head_dim_v]}
    if spec.options.needs_lse:
        lse = lse_from_rows(lse, spec)
        if live is not None:
            lse = jnp.where(live[:, None, :], lse, -jnp.inf)
        found |= marked(spec, operands, {"lse": lse})
    return tuple(found.values())


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call = call_of(spec)
    sequences = Sequences.of(spec, call, operands)
    inputs = _inputs(spec, call, operands, sequences)
    out, out_grad = operands["out"], operands["out_grad"]
    if spec.has("lse_grad"):
        out, out_grad = with_lse_grad(out, out_grad, operands["lse"], operands["lse_grad"])
    out, out_grad = (to_rows(pad_last(x, call.head_dim), call.is_packed) for x in (out, out_grad))
    out_grad = _with_others_cleared(call, out_grad, sequences.live_queries)
    # Where a row attends nothing, exp(-inf - lse) must be 0 whatever the kernel makes of -inf.
    lse = jnp.where(operands["lse"] == -jnp.inf, 0, operands["lse"])
    arrays = (out_grad, *inputs, out, lse_to_rows(lse, call.is_packed))
    _register(device)
    found = kernels.backward(call, arrays, sequences.offsets, positive_scale(spec))
    lives = (sequences.live_queries, sequences.live_keys, sequences.live_keys)
    pairs = zip(found, lives, strict=True)
    only_live = (_with_others_cleared(call, x, live) for x, live in pairs)
    dq, dk, dv = (from_rows(x, spec.batch) for x in only_live)
    gradients = {
        "query": scaled_query(spec, dq[..., : spec.head_dim]),
        "key": dk[..., : spec.head_dim],
        "value": dv[..., : spec.head_dim_v],
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


def _inputs(
    spec: AttentionSpec, call: FlashCall, operands: Mapping[str, jax.Array], sequences: Sequences
) -> list[jax.Array]:
    """query, key and value as the kernels take them."""
    # In padding 0: kernels multiply whole tiles, in which 0 · NaN is NaN. A score is masked
    # whatever it is, so what is only multiplied to scores may stay.
    live_queries = sequences.live_queries if spec.is_backward else None
    live_keys = sequences.live_keys if spec.is_backward else None
    return [
        _with_others_cleared(call, to_rows(pad_last(x, call.head_dim), call.is_packed), live)
        for x, live in (
            (scaled_query(spec, operands["query"]), live_queries),
            (operands["key"], live_keys),
            (operands["value"], sequences.live_keys),
        )
    ]


def _with_others_cleared(call: FlashCall, x: jax.Array, flags: jax.Array | None) -> jax.Array:
    """An array of the kernel's with 0 in rows whose flag is 0; None: there are none.

    In place, where nobody reads the array any more: of a step of training that is the case.
    """
    if flags is None:
        return x
    return cleared(x, flags) if call.is_packed else where_live(flags > 0, x, 0)


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
