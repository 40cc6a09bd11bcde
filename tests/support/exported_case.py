"""A named case as a program of its query, key and value, for tests/gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch_tools.verify.cases import BY_NAME

CASE = BY_NAME["shapes/bfloat16_d64_causal"]


def arrays() -> list[jax.Array]:
    operands = CASE.operands()
    return [jnp.asarray(operands[name]) for name in ("query", "key", "value")]


def attend(q, k, v):
    return attn_dispatch.dot_product_attention(
        q, k, v, is_causal=True, implementation=("cudnn", "xla")
    )
