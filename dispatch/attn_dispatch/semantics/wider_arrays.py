"""Arrays made wider without changing what attention computes: wider head dims, rows put back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def pad_last(x: jax.Array, size: int) -> jax.Array:
    """x [..., D] with zeros appended to make it [..., size].

    Zero columns of query and key add nothing to a score, and those of value make zero columns of
    the output, so the padded call computes the same numbers.
    """
    missing = size - x.shape[-1]
    return x if missing == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def padded_bytes(spec: AttentionSpec, head_dim: int, head_dim_v: int) -> int:
    """Bytes of the copies of a call's arrays and gradients that are padded to these head dims."""
    queries = spec.batch * spec.seq_len_q * spec.num_heads
    keys = spec.batch * spec.seq_len_kv * spec.num_kv_heads
    times = 2 if spec.is_backward else 1  # gradients as well, and out with out_grad
    columns = 0
    if head_dim != spec.head_dim:
        columns += (times * queries + (0 if spec.is_paged else times * keys)) * head_dim
    if head_dim_v != spec.head_dim_v:
        columns += (times * queries + (0 if spec.is_paged else times * keys)) * head_dim_v
    return columns * jnp.dtype(spec.dtype).itemsize


def prepend(x: jax.Array, count: int, *, axis: int, value: float) -> jax.Array:
    """x with `count` slices of `value` put before it along `axis`."""
    if count == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (count, 0)
    return jnp.pad(x, widths, constant_values=value)
