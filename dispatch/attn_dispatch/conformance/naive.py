"""Attention as one would write it in JAX without further thought, with every array dense.

Its error against `reference` is what an implementation's error is measured by, and its gradients
come from `jax.grad`, so it also checks that the reference's formulas are the right ones.

In 16 bits the operands of matrix products are 16-bit numbers, as matrix units take them: the
probabilities, and the gradient of the scores.

Every description (lengths, windows, segments, dropout) becomes a dense array, so that calls of the
same shape share one compilation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import DIFFERENTIABLE, AttentionOptions
from attn_dispatch.conformance.reference import (
    Operands,
    allowed,
    poison_padding,
    relative_positions,
    segment_ids,
)

COMPILE_QUICKLY: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
"""Options with which XLA compiles for the CPU in a fraction of the time."""
if jax.__version_info__ < (0, 11):
    COMPILE_QUICKLY["xla_cpu_use_fusion_emitters"] = False

_HIDDEN = -1e30


def naive(
    options: AttentionOptions, operands: Operands, keep: np.ndarray | None = None
) -> Operands:
    """What `reference` returns, computed in the dtype of the operands, on the CPU if there is one.

    Without out_grad among the operands the gradients are left out.
    """
    names = [name for name in DIFFERENTIABLE if name in operands and "out_grad" in operands]
    operands = poison_padding(options, operands, 0.0)
    b, t, n, _ = operands["query"].shape
    s, v = operands["key"].shape[1], operands["value"].shape[3]
    wide = np.promote_types(operands["query"].dtype, np.float32)

    def full(name: str, shape: tuple[int, ...], otherwise: float) -> np.ndarray:
        x = operands.get(name, np.full((1,) * len(shape), otherwise, wide))
        return np.broadcast_to(x.astype(wide), shape)

    bias = full("bias", (b, n, t, s), 0.0)
    may_attend = allowed(options, operands) & (bias != -np.inf)
    arrays = {
        "query": operands["query"],
        "key": operands["key"],
        "value": operands["value"],
        "bias": np.where(bias == -np.inf, 0, bias),
        "sinks": full("sinks", (b, n), _HIDDEN),
        "alibi_slopes": full("alibi_slopes", (b, n), 0.0),
    }
    ids = [segment_ids(options, operands, row) for row in range(b)]
    distance = np.array([abs(relative_positions(options, *pair)) for pair in ids])[:, None]
    kept = np.ones((b, n, t, s), wide)
    if keep is not None:
        kept = (keep / (1 - options.dropout_rate)).astype(wide)
    out_grad = operands.get("out_grad", np.zeros((b, t, n, v), operands["query"].dtype))
    lse_grad = operands.get("lse_grad", np.zeros((b, n, t), wide))
    cap = options.logits_soft_cap
    with jax.default_device(_cpu()), jax.default_matmul_precision("highest"):
        results = _results(
            arrays, may_attend, distance.astype(wide), kept, options.scale,
            1.0 if cap is None else cap, out_grad, lse_grad, has_cap=cap is not None,
        )  # fmt: skip
    results = {name: np.asarray(x) for name, x in results.items()}

    live = may_attend.any(axis=-1)
    found = {"out": results["out"], "lse": np.where(live, results["lse"], -np.inf)}
    if options.needs_max:
        found["row_max"] = np.where(live, results["row_max"], -np.inf)
    for name in names:
        # A shared operand's gradient is summed in the wide dtype, then rounded to its own.
        shared = operands[name].shape
        if name == "bias" and (shared[3] > 1 or s == 1):
            # Its entries are gradients of scores, in 16 bits like those that are multiplied. Those
            # of a bias that all keys share cancel, which they would not once they are rounded.
            results[name] = results[name].astype(operands["query"].dtype).astype(wide)
        axes = tuple(i for i, m in enumerate(shared) if m == 1)
        total = results[name].sum(axis=axes, keepdims=True) if axes else results[name]
        found[name] = total.astype(operands[name].dtype)
    return found


def _cpu() -> Any:
    """Where the naive computation runs: a GPU would round float32 products to TF32."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


@partial(jax.jit, static_argnames="has_cap", compiler_options=COMPILE_QUICKLY)
def _results(arrays, may_attend, distance, kept, scale, cap, out_grad, lse_grad, *, has_cap):
    def outputs(arrays):
        return _attention(arrays, may_attend, distance, kept, scale, cap if has_cap else None)

    (out, lse), pull, row_max = jax.vjp(outputs, arrays, has_aux=True)
    (gradients,) = pull((out_grad, lse_grad))
    return {"out": out, "lse": lse, "row_max": row_max, **gradients}


def _attention(arrays, may_attend, distance, kept, scale, cap):
    q, v = arrays["query"], arrays["value"]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups = q.shape[2] // v.shape[2]
    k, v = (jnp.repeat(arrays[name], groups, axis=2).astype(wide) for name in ("key", "value"))
    score = scale * jnp.einsum("btnh,bsnh->bnts", q.astype(wide), k)
    if cap is not None:
        score = cap * jnp.tanh(score / cap)
    score = score - arrays["alibi_slopes"][:, :, None, None] * distance
    score = _round_gradient(score, q.dtype) + arrays["bias"]
    score = jnp.where(may_attend, score, _HIDDEN)
    sinks = jnp.broadcast_to(arrays["sinks"][:, :, None, None], (*score.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([score, sinks], axis=-1), axis=-1)
    is_live = may_attend.any(axis=-1)
    lse = jnp.where(is_live, lse, 0)
    p = jnp.where(may_attend, jnp.exp(score - lse[..., None]), 0) * kept
    out = jnp.einsum("bnts,bsnv->btnv", p.astype(q.dtype).astype(wide), v)
    return (out.astype(q.dtype), lse), score.max(axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_gradient(x, dtype):
    """x, whose gradient passes through `dtype`."""
    del dtype
    return x


_round_gradient.defvjp(
    lambda x, dtype: (x, None), lambda dtype, _, grad: (grad.astype(dtype).astype(grad.dtype),)
)
