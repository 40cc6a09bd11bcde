"""Attention in plain XLA: every platform and every option, memory linear in sequence length.

Both directions loop over blocks of query rows, each with all keys, so that long sequences make no
[T, S] array. Where batch rows and heads are many, a block takes only some of them.

The backward pass is FlashAttention-2's (Dao 2023, algorithm 2), with dropout, the gradient of lse,
and sinks:

    p  = exp(score - lse)                          recomputed; 0 where lse is -inf
    dp = (dout · v) · keep / (1 - rate)
    ds = p · (dp - delta + dlse)                   delta = Σ p · dp;  d lse / d score = p
    d sink = Σ exp(sink - lse) · (dlse - delta)    a sink is one more score, whose value is 0

FlashAttention-2 computes delta as Σ out · dout, the same number, because none of its blocks has all
keys. Here every block does, and delta avoids the rounding of `out` to 16 bits, the largest error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.options import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.semantics.row_ids import is_packed
from attn_dispatch.semantics.sums import sum_like
from attn_dispatch.xla.blocks import Block, BlockSizes, for_each_block
from attn_dispatch.xla.paged import forward_of_pages, keys_bytes, spec_of_part
from attn_dispatch.xla.scores import BlockedCall, heads_first

NAME = "xla"
PLATFORM = None
IS_EXTRA = False
KEEPS_NAN_APART = False
DROPS_BY_POSITION = True
HAS_DECODING_KERNEL = False
SKIPS_FROM_BOTTOM_RIGHT = True

_DTYPES = ("float16", "bfloat16", "float32", "float64")

Results = dict[str, jax.Array]


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Every reason why this call cannot run on XLA; empty means that it can."""
    in_any_order = (_ANY_ORDER.reason(spec),) if _sums_in_any_order(spec, device) else ()
    return (*in_any_order, *broken(_RULES, spec))


_ANY_ORDER = Rule[AttentionSpec](
    "xla/any_order",
    lambda s: s.meaning.deterministic_backward,
    "deterministic_backward: on a GPU XLA adds up the gradients of what score_mod reads in "
    "any order, unless XLA_FLAGS has --xla_gpu_deterministic_ops=true",
)

_RULES = (
    Rule[AttentionSpec](
        "xla/symbolic_length_of_mods",
        lambda s: bool(s.meaning.mods) and s.has_symbolic_length,
        "{mods}: lengths must be known, and one of {symbols} is a symbol in a length of query or "
        "key",
        facts=lambda s: {
            "mods": " and ".join(s.meaning.mods),
            "symbols": ", ".join(s.symbols),
        },
    ),
    Rule[AttentionSpec](
        "xla/symbolic_length_of_packed",
        lambda s: is_packed(s) and s.has_symbolic_length,
        "packed sequences (segment ids, cu_seqlens) need lengths that are known, and one of "
        "{symbols} is a symbol in a length of query or key",
        facts=lambda s: {"symbols": ", ".join(s.symbols)},
    ),
    Rule[AttentionSpec](
        "xla/dtype",
        lambda s: s.dtype not in _DTYPES,
        f"dtype must be one of {', '.join(_DTYPES)}, got {{dtype}}",
        facts=lambda s: {"dtype": s.dtype},
    ),
)


def _sums_in_any_order(spec: AttentionSpec, device: Device) -> bool:
    if not spec.meaning.deterministic_backward or device.platform == "cpu":
        return False
    is_ordered = "deterministic_ops" in os.environ.get("XLA_FLAGS", "")
    return any(map(is_mod_operand, spec.wanted.gradients)) and not is_ordered


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The blocks, and the bytes of one block's scores; XLA holds a few such arrays at a time."""
    if spec.is_empty:
        return Plan("nothing to compute", 0)
    if spec.is_paged:
        part = spec_of_part(spec)
        number, inner = spec.batch // part.batch, plan(part, device)
        of_parts = f", in {number} parts of {part.batch} batch rows" if number > 1 else ""
        size = keys_bytes(part)
        engine = f"pages gathered{of_parts}; {inner.engine}"
        return Plan(engine, size + inner.workspace_bytes, inner.other_bytes)
    sizes = BlockSizes.of(spec)
    scores = sizes.score_bytes(spec)
    return Plan(sizes.describe(spec), scores, scores + _copies_bytes(spec))


def _copies_bytes(spec: AttentionSpec) -> int:
    """Bytes of the copies, with heads first, that blocks read and write.

    Forward these are query, key, value and out; backward also out_grad, the gradient of query, and
    the gradients of key and value in float32. In 16 bits:

        forward   B · T · N · (H + V) · 2       +  B · S · K · (H + V) · 2
        backward  B · T · N · (2H + 2V) · 2     +  B · S · K · (H + V) · (2 + 4)

    With the scores of two blocks the backward pass takes 0.45 GB at B 16, T 2048, N 8, K 2, H 64;
    XLA allocates 0.54 GB there for both passes (CPU).
    """
    if spec.symbols:
        return 0
    size, wide = (jnp.dtype(x).itemsize for x in (spec.dtype, spec.lse_dtype))
    h, v = spec.head_dim, spec.head_dim_v
    queries = spec.batch * spec.seq_len_q * spec.num_heads
    keys = spec.batch * spec.seq_len_kv * spec.num_kv_heads
    if not spec.is_backward:
        return (queries + keys) * (h + v) * size
    return queries * (2 * h + 2 * v) * size + keys * (h + v) * (size + wide)


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


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
    """The results that `spec.result_names` lists, out first."""

    def forward(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        return _forward(spec, device, operands, _rows)

    if spec.is_paged and not spec.is_empty:
        return forward_of_pages(spec, operands, forward)
    return forward(spec, operands)


def formula(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """out and lse of a forward call in plain JAX, differentiable in forward and reverse mode.

    Reverse mode computes each block's scores again, so that memory stays linear in the lengths.
    Matrix products are in float32, because the platform is not known here.
    """
    operands = dict(operands)
    ids = Positions.of(spec, operands).query_ids
    if ids is not None:
        # In the derivative, 0 · NaN would be NaN.
        real = ids[:, :, None, None] > 0
        operands["query"] = jnp.where(real, operands["query"], 0)

    def rows_again(call: BlockedCall, block: Block, q: jax.Array) -> Results:
        def rows() -> Results:
            return _rows(call, block, q, is_differentiated=True)

        return cast("Results", jax.checkpoint(rows)())

    out, lse = _forward(spec, CPU, operands, rows_again)
    return out, lse


def _forward(
    spec: AttentionSpec,
    device: Device,
    operands: Mapping[str, jax.Array],
    rows_of: Callable[[BlockedCall, Block, jax.Array], Results],
) -> tuple[jax.Array, ...]:
    if spec.is_empty:
        nothing = {"out": 0, "lse": -jnp.inf, "row_max": -jnp.inf, "keep": True}
        results = {
            name: jnp.full(r.shape, nothing[name], r.dtype)
            for name, r in zip(spec.result_names, spec.results, strict=True)
        }
        return tuple(nan_where_invalid(spec, operands, results).values())
    call = BlockedCall.of(spec, device, operands)
    q = heads_first(operands["query"])

    def step(block: Block, results: Results) -> Results:
        rows = rows_of(call, block, q)
        return {name: block.put(x, rows[name], "bnt") for name, x in results.items()}

    shapes = dict(zip(spec.result_names, spec.results, strict=True))
    empty = {name: jnp.zeros(r.shape, r.dtype) for name, r in shapes.items()}
    empty["out"] = heads_first(empty["out"])
    results = for_each_block(step, empty, spec, call.sizes)
    results["out"] = heads_first(results["out"])
    results = nan_where_invalid(spec, operands, results)
    return tuple(results[name] for name in spec.result_names)


def _rows(
    call: BlockedCall, block: Block, q: jax.Array, *, is_differentiated: bool = False
) -> Results:
    """The results of one block of queries, [B, N, R, ...]; q holds all queries, heads first."""
    scores = call.scores(block)
    score, _ = scores.masked(block.take(q, "bnt"), is_differentiated=is_differentiated)
    # Subtracting the maximum does not change the softmax, so it needs no derivative.
    row_max = lax.stop_gradient(score).max(axis=-1)
    is_padding = row_max == -jnp.inf
    top = jnp.where(is_padding, 0, row_max)
    if scores.sinks is not None:
        top = jnp.maximum(top, lax.stop_gradient(scores.sinks))
    # XLA may round a score differently here and in the maximum; it must not exceed the maximum. The
    # derivative of jnp.minimum would be a half where both are equal.
    below = score - top[..., None]
    p = jnp.exp(below - lax.stop_gradient(jnp.maximum(below, 0)))
    total = p.sum(axis=-1)
    if scores.sinks is not None:
        total = total + jnp.exp(scores.sinks - top)
    total = jnp.where(is_padding, 1, total)
    # Dividing after the product keeps p near 1, where float16 is finest.
    out = scores.sum_over_keys(scores.drop(p), scores.v) / total[..., None]
    lse = jnp.where(is_padding, -jnp.inf, top + jnp.log(total))
    rows = {"out": out, "lse": lse, "row_max": row_max}
    if call.spec.wanted.needs_keep:
        rows["keep"] = scores.kept
    return rows


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
        grads = dict(grads)
        scores = call.scores(block)
        q, out_grad, lse, lse_grad = (
            block.take(x, "bnt") for x in (saved.q, saved.out_grad, saved.lse, saved.lse_grad)
        )

        def add(name: str, grad: jax.Array, axes: str) -> None:
            grads[name] = block.add(grads[name], grad, axes)

        score, pull = scores.masked(q)
        p, p_sink = _probabilities(score, lse, scores.sinks)
        if "value" in wanted:
            add("value", scores.sum_over_rows(scores.drop(p), out_grad), "bk")
        if wanted == ("value",):
            return grads
        p_grad = scores.drop(scores.dot(out_grad, scores.v))
        row_grad = lse_grad - (p * p_grad).sum(axis=-1)  # dlse - delta
        score_grad = p * (p_grad + row_grad[..., None])
        if "sinks" in wanted:
            add("sinks", sum_like(p_sink * row_grad, grads["sinks"].shape), "bn")
        if "bias" in wanted:
            grads |= _with_bias_grad(block, grads, sum_like(score_grad, spec.shape("bias")))
        if "alibi_slopes" in wanted:
            moved = score_grad * scores.positions.distance().astype(call.wide)
            add("alibi_slopes", -sum_like(moved, grads["alibi_slopes"].shape), "bn")
        score_grad, read = pull(score_grad)
        for name, grad in read.items():
            if name in wanted:
                grads[name] = grads[name] + grad.astype(call.wide)
        if "query" in wanted:
            q_grad = spec.meaning.scale * scores.sum_over_keys(score_grad, scores.k)
            grads["query"] = block.put(grads["query"], q_grad, "bnt")
        if "key" in wanted:
            add("key", scores.sum_over_rows(score_grad, q), "bk")
        return grads

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
    score: jax.Array, lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Softmax of the scores, [B, N, R, S], and the sink's share of it, [B, N, R] or 0."""
    # lse is rounded: where scores are large the difference could be above 0.
    p = jnp.exp(jnp.minimum(score - lse[..., None], 0))
    p_sink = jnp.zeros_like(lse) if sinks is None else jnp.exp(sinks - lse)
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
        return _Residuals(
            real("query"), real("out_grad"), jnp.where(is_real, lse, jnp.inf), lse_grad
        )


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
