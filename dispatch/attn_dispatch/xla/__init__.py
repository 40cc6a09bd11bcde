"""Attention in plain XLA: every platform and every option, memory linear in sequence length.

Both directions go over the queries in chunks of rows, each of which sees all keys, so that no
[T, S] array is made for long sequences.

The backward pass is that of FlashAttention-2 (Dao 2023, algorithm 2) with dropout, the gradient
of lse, and sinks:

    p  = exp(score - lse)                          recomputed; 0 where lse is -inf
    dp = (dout · v) · keep / (1 - rate)
    ds = p · (dp - delta + dlse)                   delta = Σ p · dp;  d lse / d score = p
    d sink = Σ exp(sink - lse) · (dlse - delta)    a sink is one more score, whose value is 0

There, delta is Σ out · dout, the same number, because no block sees all keys. Here every chunk
does, which spares delta the rounding of `out` to 16 bits, the largest error of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.semantics.masks import take_rows
from attn_dispatch.xla.scores import Scores, heads_first

NAME = "xla"
PLATFORM = None

SCORE_BYTES = 2**27
"""Most bytes for one array of scores, [B, N, rows, S]; a single row may take more."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")

Results = dict[str, jax.Array]
Step = Callable[[jax.Array | int, int, Results], Results]


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    """Why this call cannot run here; empty means that it can."""
    del device  # XLA compiles for all of them
    reasons = []
    if spec.options.score_mod is not None:
        reasons.append("score_mod is not run by this version of the XLA implementation")
    if spec.dtype not in _DTYPES:
        reasons.append(f"dtype must be one of {', '.join(_DTYPES)}, got {spec.dtype}")
    return tuple(reasons)


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The rows in a chunk, and the bytes of its scores: XLA holds a few such arrays at a time."""
    del device
    if spec.is_empty:
        return Plan("nothing to compute", 0)
    rows = _rows_per_chunk(spec)
    chunks = -(-spec.seq_len_q // rows)
    return Plan(f"{chunks} x {rows} query rows" if chunks > 1 else "dense", rows * _row_bytes(spec))


def unusable_reason(device: Device) -> str:
    """Empty: XLA runs everywhere."""
    del device
    return ""


def version() -> None:
    """None: XLA is jaxlib's."""


def library_lines() -> list[str]:
    """None: XLA is jaxlib's."""
    return []


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """out and whatever else `spec.result_names` says."""
    if spec.is_empty:
        nothing = {"out": 0, "lse": -jnp.inf, "row_max": -jnp.inf, "keep": True}
        return tuple(
            jnp.full(r.shape, nothing[name], r.dtype)
            for name, r in zip(spec.result_names, spec.results, strict=True)
        )
    scores = Scores.of(spec, device, operands)
    q, k, v = heads_first(operands["query"]), scores.keys("key"), scores.keys("value")
    sinks = scores.sinks()

    def step(start: jax.Array | int, size: int, results: Results) -> Results:
        score, _ = scores.masked(take_rows(q, start, size), k, start)
        row_max = score.max(axis=-1)  # [B, N, size]
        is_dead = row_max == -jnp.inf
        top = jnp.where(is_dead, 0, row_max)
        if sinks is not None:
            top = jnp.maximum(top, sinks)
        p = jnp.exp(score - top[..., None])
        total = p.sum(axis=-1)
        if sinks is not None:
            total = total + jnp.exp(sinks - top)
        total = jnp.where(is_dead, 1, total)
        # Dividing after the product keeps p near 1, where float16 is finest.
        out = scores.sum_over_keys(scores.drop(p, start), v) / total[..., None]
        lse = jnp.where(is_dead, -jnp.inf, top + jnp.log(total))
        rows = {"out": out, "lse": lse, "row_max": row_max}
        if "keep" in results:
            rows["keep"] = scores.kept(start, size)
        return {name: _put_rows(x, rows[name], start) for name, x in results.items()}

    shapes = dict(zip(spec.result_names, spec.results, strict=True))
    empty = {name: jnp.zeros(r.shape, r.dtype) for name, r in shapes.items()}
    empty["out"] = heads_first(empty["out"])
    results = _for_each_chunk(step, empty, spec.seq_len_q, _rows_per_chunk(spec))
    results["out"] = heads_first(results["out"])
    return tuple(results[name] for name in spec.result_names)


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The gradients that `spec.options.gradients` names, each like its operand."""
    if spec.is_empty:
        return tuple(jnp.zeros(r.shape, r.dtype) for r in spec.results)
    scores = Scores.of(spec, device, operands)
    saved = _Residuals.of(scores)
    k, v, sinks = scores.keys("key"), scores.keys("value"), scores.sinks()
    wanted = set(spec.options.gradients)

    def step(start: jax.Array | int, size: int, grads: Results) -> Results:
        grads = dict(grads)
        q, out_grad, lse, lse_grad = (
            take_rows(x, start, size) for x in (saved.q, saved.out_grad, saved.lse, saved.lse_grad)
        )
        score, cap_slope = scores.masked(q, k, start)
        p, p_sink = _probabilities(score, lse, sinks)
        if "value" in wanted:
            grads["value"] += scores.sum_over_rows(scores.drop(p, start), out_grad)
        if wanted == {"value"}:
            return grads
        p_grad = scores.drop(scores.dot(out_grad, v), start)
        row_grad = lse_grad - (p * p_grad).sum(axis=-1)  # dlse - delta
        score_grad = p * (p_grad + row_grad[..., None])
        if "sinks" in wanted:
            grads["sinks"] += _sum_like(p_sink * row_grad, grads["sinks"].shape)
        if "bias" in wanted:
            bias_grad = _sum_like(score_grad, operands["bias"].shape)
            if operands["bias"].shape[2] == 1:
                grads["bias"] += bias_grad
            else:
                grads["bias"] = _put_rows(grads["bias"], bias_grad, start)
        if "alibi_slopes" in wanted:
            moved = score_grad * scores.positions.rows(start, size).distance()
            grads["alibi_slopes"] -= _sum_like(moved, grads["alibi_slopes"].shape)
        if cap_slope is not None:
            score_grad = score_grad * cap_slope
        if "query" in wanted:
            q_grad = spec.options.scale * scores.sum_over_keys(score_grad, k)
            grads["query"] = _put_rows(grads["query"], q_grad, start)
        if "key" in wanted:
            grads["key"] += scores.sum_over_rows(score_grad, q)
        return grads

    zeros = _zero_grads(scores, wanted)
    grads = _for_each_chunk(step, zeros, spec.seq_len_q, _rows_per_chunk(spec))
    if "key" in wanted:
        grads["key"] = spec.options.scale * grads["key"]
    for name in wanted & {"query", "key", "value"}:
        grads[name] = heads_first(grads[name])
    return tuple(
        grads[name].reshape(result.shape).astype(result.dtype)
        for name, result in zip(spec.options.gradients, spec.results, strict=True)
    )


def _probabilities(
    score: jax.Array, lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Softmax of the scores, [B, N, R, S], and the sink's share of it, [B, N, R] or 0."""
    p = jnp.exp(score - lse[..., None])
    p_sink = jnp.zeros_like(lse) if sinks is None else jnp.exp(sinks - lse)
    # lse is rounded: where it is some hundreds, p sums to 1 only to within 1e-5.
    total = p.sum(axis=-1) + p_sink
    total = jnp.where(total == 0, 1, total)
    return p / total[..., None], p_sink / total


@dataclass(frozen=True)
class _Residuals:
    """What the forward pass left, and the cotangents, made harmless in rows that attend nothing."""

    q: jax.Array
    """[B, N, T, H]."""
    out_grad: jax.Array
    """[B, N, T, V]."""
    lse: jax.Array
    """Wide [B, N, T]; +inf where the row attends nothing, so that exp(score - lse) is 0."""
    lse_grad: jax.Array
    """Wide [B, N, T], or [1, 1, 1] with 0."""

    @staticmethod
    def of(scores: Scores) -> _Residuals:
        operands, ids, wide = scores.operands, scores.positions.query_ids, scores.wide
        lse = operands["lse"].astype(wide)
        if ids is not None:
            lse = jnp.where(ids[:, None, :] > 0, lse, -jnp.inf)
        is_live = lse != -jnp.inf

        def live(name: str) -> jax.Array:
            return jnp.where(is_live[..., None], heads_first(operands[name]), 0)

        lse_grad = jnp.zeros((1, 1, 1), wide)
        if scores.spec.has("lse_grad"):
            lse_grad = jnp.where(is_live, operands["lse_grad"].astype(wide), 0)
        return _Residuals(
            live("query"), live("out_grad"), jnp.where(is_live, lse, jnp.inf), lse_grad
        )


def _zero_grads(scores: Scores, wanted: set[str]) -> Results:
    """Where the chunks leave their gradients: rows in the final dtype, sums over rows wide."""
    spec, wide = scores.spec, scores.wide
    b, n, k = spec.batch, spec.num_heads, spec.num_kv_heads
    zeros: dict[str, tuple[tuple[int, ...], jnp.dtype]] = {
        "query": ((b, n, spec.seq_len_q, spec.head_dim), jnp.dtype(spec.dtype)),
        "key": ((b, k, spec.seq_len_kv, spec.head_dim), wide),
        "value": ((b, k, spec.seq_len_kv, spec.head_dim_v), wide),
    }
    if "bias" in wanted:
        bias = scores.operands["bias"]
        zeros["bias"] = (bias.shape, wide if bias.shape[2] == 1 else bias.dtype)
    if "sinks" in wanted:
        zeros["sinks"] = ((*spec.shape("sinks"), 1), wide)
    if "alibi_slopes" in wanted:
        zeros["alibi_slopes"] = ((*spec.shape("alibi_slopes"), 1, 1), wide)
    return {name: jnp.zeros(*zero) for name, zero in zeros.items() if name in wanted}


def _rows_per_chunk(spec: AttentionSpec) -> int:
    """All query rows, or the largest power of two of them whose scores fit in SCORE_BYTES."""
    fitting = SCORE_BYTES // _row_bytes(spec)
    return min(spec.seq_len_q, 1 << max(fitting.bit_length() - 1, 0))


def _row_bytes(spec: AttentionSpec) -> int:
    """Bytes of the scores of one query row, in all batch rows and heads."""
    itemsize = jnp.dtype(spec.lse_dtype).itemsize
    # In an exported module the batch may be a symbol: then each row of it counts alone.
    batch = spec.batch if isinstance(spec.batch, int) else 1
    return batch * spec.num_heads * spec.seq_len_kv * itemsize


def _for_each_chunk(step: Step, results: Results, num_rows: int, rows: int) -> Results:
    """step(start, size, results) for every chunk of rows in turn; the last one may be shorter."""
    whole, rest = divmod(num_rows, rows)
    if whole == 1:
        results = step(0, rows, results)
    else:
        results = lax.fori_loop(0, whole, lambda c, r: step(c * rows, rows, r), results)
    return step(whole * rows, rest, results) if rest else results


def _put_rows(x: jax.Array, rows: jax.Array, start: jax.Array | int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), start, axis=2)


def _sum_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x summed over the axes that have length 1 in shape, which stay as 1."""
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
