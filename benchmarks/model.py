"""A training step of a decoder on packed documents, and the share that attention has in it.

usage: python benchmarks/model.py [--rounds N] [--seconds S] [--out FOLDER]

The model has four layers as in Llama 3 8B (hidden 4096, 32 query heads, 8 kv heads, head dim 128,
MLP 14336, RMSNorm, rotary positions; 870 million parameters), in bfloat16. A step is forward,
backward and SGD with momentum on one row of 16,384 tokens that holds 16 documents. Attention is our
call with the default choice and with each implementation, dew-flash-attn's bare kernels, or
jax.nn's on cuDNN with the same documents as a padded batch, in which every layer has more rows.
"none" leaves attention out, and so measures the rest of the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from extras import bare_kernels

from attn_dispatch import dot_product_attention, flash, ragged_dot_product_attention
from attn_dispatch.core.tuning.timing import orders
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.reports.environment import environment

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP = 4, 4096, 32, 8, 128, 14336
LONGEST = 2048
LENGTHS = np.random.default_rng(0).integers(184, 1844, 16)
TOKENS = 16384
assert TOKENS - 1000 < LENGTHS.sum() <= TOKENS

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function of query, key and value, each [tokens, heads, dim]."""


def parameters(key: jax.Array) -> dict[str, jax.Array]:
    """The weights of all layers, stacked: [LAYERS, inputs, outputs]."""
    shapes = {
        "q": (HIDDEN, HEADS * DIM), "k": (HIDDEN, KV_HEADS * DIM), "v": (HIDDEN, KV_HEADS * DIM),
        "o": (HEADS * DIM, HIDDEN), "up": (HIDDEN, MLP), "gate": (HIDDEN, MLP),
        "down": (MLP, HIDDEN),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, (LAYERS, *shape), jnp.bfloat16) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [tokens, heads, dim], turned by rotary positions."""
    angles = positions[:, None, None] * 500000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss(
    weights: Any, x: jax.Array, positions: jax.Array, is_real: jax.Array, attention: Attention
):
    """The mean square of the output, from rows x [tokens, hidden]; padding rows count as 0."""

    def layer(x: jax.Array, w: dict[str, jax.Array]):
        y = norm(x)
        q, k, v = ((y @ w[name]).reshape(len(y), -1, DIM) for name in "qkv")
        out = attention(rotary(q, positions), rotary(k, positions), v)
        x = x + out.reshape(len(y), -1) @ w["o"]
        y = norm(x)
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, weights)
    return (jnp.where(is_real[:, None], norm(x), 0).astype(jnp.float32) ** 2).mean()


def train_step(attention: Attention, positions: jax.Array, is_real: jax.Array):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, momentum: Any, x: jax.Array):
        value, grads = jax.value_and_grad(loss)(weights, x, positions, is_real, attention)
        momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), momentum, grads)
        weights = jax.tree.map(lambda w, m: (w - 1e-3 * m).astype(w.dtype), weights, momentum)
        return weights, momentum, value

    return step


def packed_rows() -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """The rows' positions in their documents, which rows belong to one, and cu_seqlens."""
    positions = np.concatenate([np.arange(x) for x in LENGTHS])
    padding = TOKENS - len(positions)
    is_real = np.arange(TOKENS) < len(positions)
    cu = jnp.asarray([0, *np.cumsum(LENGTHS)], jnp.int32)
    return np.pad(positions, (0, padding)), is_real, cu


def ours(implementation: str | None, cu: jax.Array) -> Attention:
    return partial(
        ragged_dot_product_attention, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=LONGEST,
        max_seqlen_kv=LONGEST, is_causal=True, implementation=implementation,
    )  # fmt: skip


def by_segment_ids(implementation: str | None) -> Attention:
    ids = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    ids = jnp.asarray(np.pad(ids, (0, TOKENS - len(ids)))[None], jnp.int32)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dot_product_attention(
            q[None], k[None], v[None], is_causal=True, query_segment_ids=ids,
            max_segments=len(LENGTHS), max_segment_len=LONGEST, implementation=implementation,
        )[0]  # fmt: skip

    return attention


def bare(cu: jax.Array) -> Attention:
    forward, backward = bare_kernels(cu, LONGEST)

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def remember(q: jax.Array, k: jax.Array, v: jax.Array):
        out, lse = forward(q, k, v)
        return out, (q, k, v, out, lse)

    attention.defvjp(remember, lambda residuals, grad: tuple(backward(grad, *residuals)))
    return attention


def padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """jax.nn's attention; the rows are those of a padded batch."""
    batch = [x.reshape(len(LENGTHS), LONGEST, *x.shape[1:]) for x in (q, k, v)]
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    out = jax.nn.dot_product_attention(
        *batch, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip
    return out.reshape(q.shape)


def none(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """No attention: the cheapest function that has gradients for all three operands."""
    return q + jnp.repeat(k + v, HEADS // KV_HEADS, axis=1)


def main() -> None:
    args = arguments("A training step of a decoder.", rounds=12, seconds=0.3)
    positions, is_real, cu = packed_rows()
    calls: dict[str, Attention] = {"ours": ours(None, cu), "ours: cudnn": ours("cudnn", cu)}
    if not flash.unusable_reason(default_device()):
        calls |= {"ours: flash": ours("flash", cu), "dew-flash-attn": bare(cu)}
        calls["ours: segment ids, flash"] = by_segment_ids("flash")
    calls["ours: segment ids, cudnn"] = by_segment_ids("cudnn")
    calls |= {"none": none, "jax.nn, padded": padded}
    facts = environment() | {"dew_flash_attn": str(flash.version())}
    weights = parameters(jax.random.key(0))
    momentum = jax.tree.map(jnp.zeros_like, weights)
    steps, losses, rows = {}, {}, {}
    for name, attention in calls.items():
        if name == "jax.nn, padded":
            padded_positions = np.tile(np.arange(LONGEST), len(LENGTHS))
            is_token = jnp.asarray(padded_positions < np.repeat(LENGTHS, LONGEST))
            step = train_step(attention, jnp.asarray(padded_positions), is_token)
            rows[name] = len(padded_positions)
        else:
            step = train_step(attention, jnp.asarray(positions), jnp.asarray(is_real))
            rows[name] = TOKENS
        x = jax.random.normal(jax.random.key(1), (rows[name], HIDDEN), jnp.bfloat16)
        compiled = step.lower(weights, momentum, x).compile()
        weights, momentum, value = compiled(weights, momentum, x)
        steps[name], losses[name] = (compiled, x), float(value)
    times: dict[str, list[float]] = {name: [] for name in steps}
    names, square = list(steps), orders(len(steps))
    for i in range(args.rounds):
        for place in square[i % len(square)]:
            compiled, x = steps[names[place]]
            calls_made = 0
            start = time.perf_counter()
            while time.perf_counter() - start < args.seconds or calls_made < 2:
                weights, momentum, value = compiled(weights, momentum, x)
                jax.block_until_ready(value)
                calls_made += 1
            times[names[place]].append((time.perf_counter() - start) / calls_made)
    tokens = int(LENGTHS.sum())
    found = {
        name: {
            "step_ms": 1e3 * statistics.median(x),
            "min_ms": 1e3 * min(x),
            "tokens_per_second": tokens / statistics.median(x),
            "memory_bytes": steps[name][0].memory_analysis().temp_size_in_bytes,
            "first_loss": losses[name],
        }
        for name, x in times.items()
    }
    for name, row in found.items():
        share = 1 - found["none"]["step_ms"] / row["step_ms"]
        row["attention_share"] = share
        print(f"{name:26s}{row['step_ms']:8.2f} ms{row['tokens_per_second']:9.0f} tokens/s"
              f"{100 * share:5.1f} % attention", flush=True)  # fmt: skip
    save("model", {"environment": facts, "tokens": tokens, "steps": found}, args.out)


if __name__ == "__main__":
    main()
