"""Attention as one would write it in JAX without further thought, with every array dense.

Its error against `reference` is what an implementation's error is measured by, and its gradients
come from `jax.grad`, so it also checks that the reference's formulas are the right ones.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.spec import DIFFERENTIABLE, AttentionOptions
from reference import Operands, allowed, poison_padding, relative_positions, segment_ids

COMPILE_QUICKLY: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
"""Options with which XLA compiles for the CPU in a fraction of the time."""
if jax.__version_info__ < (0, 11):
    COMPILE_QUICKLY["xla_cpu_use_fusion_emitters"] = False

_HIDDEN = -1e30


def naive(options: AttentionOptions, operands: Operands, keep: np.ndarray | None) -> Operands:
    """What `reference` returns, computed in the dtype of the operands."""
    operands = poison_padding(operands, 0.0)
    b, t, n, _ = operands["query"].shape
    s = operands["key"].shape[1]
    wide = np.promote_types(operands["query"].dtype, np.float32)
    bias = operands.get("bias", np.zeros((1, 1, 1, 1), wide))
    may_attend = allowed(options, operands) & (bias != -np.inf)
    distance = [
        abs(relative_positions(options, *segment_ids(operands, batch_row)))
        for batch_row in range(b)
    ]
    arrays = {
        "query": operands["query"],
        "key": operands["key"],
        "value": operands["value"],
        "bias": np.where(bias == -np.inf, 0, bias).astype(bias.dtype),
        "sinks": operands.get("sinks", np.full((1, n), _HIDDEN, wide)),
        "alibi_slopes": operands.get("alibi_slopes", np.zeros((1, n), wide)),
    }
    kept = np.ones((b, n, t, s)) if keep is None else keep / (1 - options.dropout_rate)
    constants = (may_attend, np.array(distance)[:, None], kept.astype(wide))
    cap = options.logits_soft_cap
    scalars = (options.scale, 1.0 if cap is None else cap)
    out_grad = operands["out_grad"]
    lse_grad = operands.get("lse_grad", np.zeros((b, n, t), wide))
    results = _all(arrays, *constants, *scalars, out_grad, lse_grad, has_cap=cap is not None)
    lse = np.where(may_attend.any(axis=-1), results.pop("lse"), -np.inf)
    names = [name for name in DIFFERENTIABLE if name in operands]
    return {"out": results["out"], "lse": lse} | {name: results[name] for name in names}


@partial(
    jax.jit,
    static_argnames="has_cap",
    compiler_options=COMPILE_QUICKLY,
)
def _all(arrays, may_attend, distance, kept, scale, cap, out_grad, lse_grad, *, has_cap):
    def outputs(arrays):
        return _attention(arrays, may_attend, distance, kept, scale, cap if has_cap else None)

    (out, lse), pull = jax.vjp(outputs, arrays)
    (gradients,) = pull((out_grad, lse_grad))
    return {"out": out, "lse": lse, **gradients}


def _attention(arrays, may_attend, distance, kept, scale, cap):
    q, v = arrays["query"], arrays["value"]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups = q.shape[2] // v.shape[2]
    k, v = (jnp.repeat(arrays[name], groups, axis=2).astype(wide) for name in ("key", "value"))
    score = scale * jnp.einsum("btnh,bsnh->bnts", q.astype(wide), k)
    if cap is not None:
        score = cap * jnp.tanh(score / cap)
    score = score + arrays["bias"].astype(wide)
    score = score - arrays["alibi_slopes"].astype(wide)[:, :, None, None] * distance
    score = jnp.where(may_attend, score, _HIDDEN)
    sinks = arrays["sinks"].astype(wide)[:, :, None, None]
    sinks = jnp.broadcast_to(sinks, (*score.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([score, sinks], axis=-1), axis=-1)
    is_live = may_attend.any(axis=-1)
    lse = jnp.where(is_live, lse, 0)
    p = jnp.where(may_attend, jnp.exp(score - lse[..., None]), 0) * kept
    out = jnp.einsum("bnts,bsnv->btnv", p.astype(q.dtype).astype(wide), v)
    return out.astype(q.dtype), lse
