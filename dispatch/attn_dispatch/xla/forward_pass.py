"""The forward pass, block by block, and the same as formulas that JAX can differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import CPU
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.xla.blocks import Block, Results, for_each_block
from attn_dispatch.xla.paged import forward_of_pages
from attn_dispatch.xla.scores import BlockedCall, heads_first


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
