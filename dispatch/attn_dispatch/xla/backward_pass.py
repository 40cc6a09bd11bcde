"""The backward pass, block by block.

It is FlashAttention-2's (Dao 2023, algorithm 2), with dropout, the gradient of lse, and sinks:

    p  = exp(score - lse)                          recomputed; 0 where lse is -inf
    dp = (dout · v) · keep / (1 - rate)
    ds = p · (dp - delta + dlse)                   delta = Σ p · dp;  d lse / d score = p
    d sink = Σ exp(sink - lse) · (dlse - delta)    a sink is one more score, whose value is 0

FlashAttention-2 computes delta as Σ out · dout, the same number, because none of its blocks has all
keys. Here every block does, and delta avoids the rounding of `out` to 16 bits, the largest error.
If the call has a part of the keys that `out` is of, delta is computed as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.semantics.sums import sum_like
from attn_dispatch.xla.blocks import Block, Results, for_each_block
from attn_dispatch.xla.scores import BlockedCall, Scores, heads_first


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The gradients that `spec.wanted.gradients` names, in the shape and dtype of the operands."""
    if spec.is_empty:
        return tuple(jnp.zeros(r.shape, r.dtype) for r in spec.results)
    call = BlockedCall.of(spec, device, operands)
    saved = _Residuals.of(call)
    wanted = spec.wanted.gradients

    def step(block: Block, grads: Results) -> Results:
        return _with_block(call, saved, block, grads)

    # Blocks that share rows of the bias must be consecutive.
    batch_is_inner = "bias" in wanted and spec.shape("bias")[0] == 1
    zeros = _zero_grads(call, wanted)
    grads = for_each_block(step, zeros, spec, call.sizes, batch_is_inner=batch_is_inner)
    if "key" in wanted:
        grads["key"] = spec.meaning.scale * grads["key"]
    for name in ("query", "key", "value"):
        if name in wanted:
            grads[name] = heads_first(grads[name])
    return tuple(
        grads[name].reshape(result.shape).astype(result.dtype)
        for name, result in zip(spec.wanted.gradients, spec.results, strict=True)
    )


def _with_block(call: BlockedCall, saved: _Residuals, block: Block, grads: Results) -> Results:
    """The gradients with those of one more block added."""
    grads, scores, wanted = dict(grads), call.scores(block), call.spec.wanted.gradients
    q, out_grad, lse, lse_grad = (
        block.take(x, "bnt") for x in (saved.q, saved.out_grad, saved.lse, saved.lse_grad)
    )
    score, pull = scores.masked(q)
    is_part = saved.delta is not None
    p, p_sink = _probabilities(score, lse, scores.sinks, is_part=is_part)
    if "value" in wanted:
        grad = scores.sum_over_rows(scores.drop(p), out_grad)
        grads["value"] = block.add(grads["value"], grad, "bk")
    if wanted == ("value",):
        return grads
    p_grad = scores.drop(scores.dot(out_grad, scores.v))
    if saved.delta is None:
        row_grad = lse_grad - (p * p_grad).sum(axis=-1)  # dlse - delta
    else:
        row_grad = lse_grad - block.take(saved.delta, "bnt")
    score_grad = p * (p_grad + row_grad[..., None])
    if "sinks" in wanted:
        grad = sum_like(p_sink * row_grad, grads["sinks"].shape)
        grads["sinks"] = block.add(grads["sinks"], grad, "bn")
    grads |= _added_terms(call, scores, block, grads, score_grad)
    score_grad, read = pull(score_grad)
    grads |= {x: grads[x] + grad.astype(call.wide) for x, grad in read.items() if x in wanted}
    if "query" in wanted:
        q_grad = call.spec.meaning.scale * scores.sum_over_keys(score_grad, scores.k)
        grads["query"] = block.put(grads["query"], q_grad, "bnt")
    if "key" in wanted:
        grads["key"] = block.add(grads["key"], scores.sum_over_rows(score_grad, q), "bk")
    return grads


def _added_terms(
    call: BlockedCall, scores: Scores, block: Block, grads: Results, score_grad: jax.Array
) -> Results:
    """The wanted gradients of what is added to scores, bias and ALiBi slopes, after a block."""
    found: Results = {}
    if "bias" in grads:
        grad = sum_like(score_grad, call.spec.shape("bias"))
        found |= _with_bias_grad(block, grads, grad)
    if "alibi_slopes" in grads:
        slopes = grads["alibi_slopes"]
        moved = score_grad * scores.positions.distance().astype(call.wide)
        found["alibi_slopes"] = block.add(slopes, -sum_like(moved, slopes.shape), "bn")
    return found


def _with_bias_grad(block: Block, grads: Results, grad: jax.Array) -> Results:
    """The entries "bias" and "bias_rows" of grads after a block, whose gradient is `grad`.

    `grad` is [1|B, 1|N, 1|R, 1|S]. The gradient of rows that several blocks share is summed in
    "bias_rows", in a wide dtype. Each of these blocks stores the sum so far, the last the total.
    """
    bias = grads["bias"]
    if bias.shape[2] == 1:
        return {"bias": block.add(bias, grad, "bnt")}
    if "bias_rows" not in grads:
        return {"bias": block.put(bias, grad, "bnt")}
    is_first = jnp.bool_(True)
    for axis, letter in enumerate("bn"):
        if bias.shape[axis] == 1:
            is_first &= block.starts[letter] == 0
    rows = grads["bias_rows"]
    total = jnp.where(is_first, 0, rows[:, :, : grad.shape[2]]) + grad
    return {
        "bias": block.put(bias, total, "bnt"),
        "bias_rows": lax.dynamic_update_slice(rows, total, (0, 0, 0, 0)),
    }


def _probabilities(
    score: jax.Array, lse: jax.Array, sinks: jax.Array | None, *, is_part: bool
) -> tuple[jax.Array, jax.Array]:
    """Softmax of the scores, [B, N, R, S], and the sink's share of it, [B, N, R] or 0.

    `is_part`: lse is of further keys as well.
    """
    # lse is rounded: where scores are large the difference could be above 0.
    p = jnp.exp(jnp.minimum(score - lse[..., None], 0))
    p_sink = jnp.zeros_like(lse) if sinks is None else jnp.exp(sinks - lse)
    if is_part:
        return p, p_sink
    # lse is rounded: at some hundreds, the p of a row sum to 1 only to within 1e-5.
    total = p.sum(axis=-1) + p_sink
    total = jnp.where(total == 0, 1, total)
    return p / total[..., None], p_sink / total


@dataclass(frozen=True)
class _Residuals:
    """The residuals of the forward pass and the cotangents, neutral in padding rows."""

    q: jax.Array
    """[B, N, T, H]."""
    out_grad: jax.Array
    """[B, N, T, V]."""
    lse: jax.Array
    """Wide [B, N, T]; +inf in padding rows, so that exp(score - lse) is 0."""
    lse_grad: jax.Array
    """Wide [B, N, T], or a 0 of shape [1, 1, 1] if the call has none."""
    delta: jax.Array | None = None
    """Wide [B, N, T], if the call has a part of the keys."""

    @staticmethod
    def of(call: BlockedCall) -> _Residuals:
        operands, ids, wide = call.operands, call.positions.query_ids, call.wide
        lse = operands["lse"].astype(wide)
        if ids is not None:
            lse = jnp.where(ids[:, None, :] > 0, lse, -jnp.inf)
        is_real = lse != -jnp.inf

        def real(name: str) -> jax.Array:
            return jnp.where(is_real[..., None], heads_first(operands[name]), 0)

        lse_grad = jnp.zeros((1, 1, 1), wide)
        if call.spec.has("lse_grad"):
            lse_grad = jnp.where(is_real, operands["lse_grad"].astype(wide), 0)
        q, out_grad = real("query"), real("out_grad")
        lse = jnp.where(is_real, lse, jnp.inf)
        delta = None
        if call.spec.promises.is_part:
            delta = (real("out").astype(wide) * out_grad.astype(wide)).sum(axis=-1)
        return _Residuals(q, out_grad, lse, lse_grad, delta)


def _zero_grads(call: BlockedCall, wanted: tuple[str, ...]) -> Results:
    """The arrays that blocks put gradients into: rows in the final dtype, sums over blocks wide.

    "bias_rows" sums one block's rows of a bias's gradient over batch or heads.
    """
    spec, wide, sizes = call.spec, call.wide, call.sizes
    b, n, k = spec.batch, spec.num_heads, spec.num_kv_heads
    zeros: dict[str, tuple[tuple[int, ...], jnp.dtype]] = {
        "query": ((b, n, spec.seq_len_q, spec.head_dim), jnp.dtype(spec.dtype)),
        "key": ((b, k, spec.seq_len_kv, spec.head_dim), wide),
        "value": ((b, k, spec.seq_len_kv, spec.head_dim_v), wide),
    }
    if "bias" in wanted:
        bias = call.operands["bias"]
        has_rows = bias.shape[2] != 1
        zeros["bias"] = (bias.shape, bias.dtype if has_rows else wide)
        batch_parts, head_parts = sizes.parts(spec)
        is_shared = (bias.shape[0] == 1 and batch_parts > 1) or (
            bias.shape[1] == 1 and head_parts > 1
        )
        if has_rows and is_shared:
            largest = (sizes.batch, n // head_parts, sizes.rows, bias.shape[3])
            shape = tuple(min(x, y) for x, y in zip(bias.shape, largest, strict=True))
            zeros["bias_rows"] = (shape, wide)
    if "sinks" in wanted:
        zeros["sinks"] = ((*spec.shape("sinks"), 1), wide)
    if "alibi_slopes" in wanted:
        zeros["alibi_slopes"] = ((*spec.shape("alibi_slopes"), 1, 1), wide)
    for name in filter(is_mod_operand, wanted):
        zeros[name] = (spec.shape(name), wide)
    return {
        name: jnp.zeros(*zero)
        for name, zero in zeros.items()
        if name in wanted or name == "bias_rows"
    }
