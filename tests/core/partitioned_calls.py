"""Compare calls on four virtual CPU devices with the same calls on one; print JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from tests.support.present import present

SHARDINGS = {
    "batch": P("x"),
    "heads": P(None, None, "y"),
    "batch_and_heads": P("x", None, "y"),
    "batch_over_both": P(("x", "y")),
    "heads_over_both": P(None, None, ("x", "y")),
    "sequence": P(None, "x"),
}


def arrays(kv_heads: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((4, 64, 8, 16), (4, 64, kv_heads, 16), (4, 64, kv_heads, 16), (4, 64, 8, 16))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def step(q, k, v, out_grad, **options):
    """out, lse and the gradients of a function of both."""

    def call(q, k, v):
        return attn_dispatch.dot_product_attention(
            q, k, v, is_causal=True, return_lse=True, **options
        )

    (out, lse), pull = jax.vjp(call, q, k, v)
    return out, lse, *pull((out_grad, jnp.ones_like(lse)))


def error(got, expected) -> float:
    """Largest absolute difference; infinite where NaN or infinities are in different places."""

    def difference(x, y):
        return jnp.where(x == y, 0, jnp.nan_to_num(jnp.abs(x - y), nan=jnp.inf)).max()

    return max(float(difference(x, y)) for x, y in zip(got, expected, strict=True))


def place(x: jax.Array, mesh: jax.sharding.Mesh, sharding: P) -> jax.Array:
    """x sharded by `sharding`; its heads stay whole if 4 does not divide them."""
    if len(sharding) == 3 and x.shape[2] % 4:
        sharding = P(sharding[0])
    return jax.device_put(x, NamedSharding(mesh, sharding))


def under_jit(mesh: jax.sharding.Mesh, kv_heads: int, spec: P) -> dict[str, Any]:
    operands = arrays(kv_heads)
    sharded = [place(x, mesh, spec) for x in operands]
    compiled = jax.jit(step).lower(*sharded).compile()
    results = compiled(*sharded)
    return {
        "error": error(results, jax.jit(step)(*operands)),
        "gathers": "all-gather" in present(compiled.as_text()),
        "out": list(results[0].sharding.spec),
    }


def under_shard_map(mesh: jax.sharding.Mesh, **options: Any) -> float:
    """Batch sharded, keys and values shared by all devices; their gradients sum over devices."""
    q, _, _, out_grad = arrays(8)
    _, k, v, _ = (x[:1] for x in arrays(2))

    def attend(q, k, v):
        k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
        return attn_dispatch.dot_product_attention(q, k, v, is_causal=True, **options)

    def loss(q, k, v, out_grad):
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        return (mapped(q, k, v) * out_grad).sum()

    def plain_loss(q, k, v, out_grad):
        return (attend(q, k, v) * out_grad).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, out_grad)
    return error(got, jax.jit(jax.grad(plain_loss, argnums=(0, 1, 2)))(q, k, v, out_grad))


def shared_bias_under_shard_map(mesh: jax.sharding.Mesh) -> float:
    """The gradient of a bias that is replicated beside sharded operands."""
    q, k, v, out_grad = arrays(2)
    bias = jax.random.normal(jax.random.key(9), (1, 8, 64, 64))

    def attend(q, k, v, bias):
        return attn_dispatch.dot_product_attention(q, k, v, bias)

    specs = (P("x"), P("x"), P("x"), P())
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("x"))
    gradients = [
        jax.jit(jax.grad(lambda b, f=f: (f(q, k, v, b) * out_grad).sum()))(bias)
        for f in (mapped, attend)
    ]
    return error(gradients[:1], gradients[1:])


def with_operand(mesh: jax.sharding.Mesh, name: str, x: Any, spec: P, k: int) -> dict[str, Any]:
    """A call with one more operand x, whose gradient is among the results if it has one.

    The operand is replicated on every device.
    """
    operands, more = arrays(k), OPTIONS.get(name, {})
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if name.endswith("_segment_ids"):
        more: dict[str, Any] = {"key_value_segment_ids": x, "max_segments": 3}

    @jax.jit
    def call(x, q, k, v, out_grad):
        def run(x, q, k, v):
            return attn_dispatch.dot_product_attention(
                q, k, v, **{name: x}, **more, return_lse=True, return_max_logits=True
            )

        (out, lse, maxima), pull = jax.vjp(run, x, q, k, v)
        lse_grad = jnp.where(lse == -jnp.inf, 0, jnp.sin(out.sum(-1)))
        gradients = pull((out_grad, lse_grad, jnp.zeros_like(maxima)))
        return out, lse, maxima, *gradients[not is_float :]

    return compared(call, x, *(place(x, mesh, spec) for x in operands), plain=(x, *operands))


def compared(call: Any, *sharded: jax.Array, plain: tuple[jax.Array, ...]) -> dict[str, Any]:
    compiled = call.lower(*sharded).compile()
    text = compiled.as_text()
    return {
        "error": error(compiled(*sharded), call(*plain)),
        "gathers": "all-gather" in text or "all-to-all" in text,
    }


def operands_to_try() -> dict[str, Any]:
    """Operands by argument name and, after "/", a variant; axes: batch, heads, queries, keys."""
    key = jax.random.key(9)
    ids = jnp.sort(jax.random.randint(key, (4, 64), 0, 4), axis=1)
    shapes = ((4, 8, 64, 64), (1, 8, 64, 64), (4, 1, 64, 64), (1, 1, 1, 64), (4, 8, 1, 1))
    tried = {f"bias/{i}": jax.random.normal(key, shape) for i, shape in enumerate(shapes)}
    tried |= {
        "mask/0": jax.random.bernoulli(key, 0.7, (4, 1, 64, 64)),
        "query_seq_lengths/0": jnp.array([64, 10, 0, 33]),
        "key_value_seq_lengths/0": jnp.array([5, 64, 3, 0]),
        "causal_alignment/shared": jnp.int32(7),
        "causal_alignment/0": jnp.array([-9, 0, 40, 64]),
        "query_segment_ids/0": ids,
        "sinks/shared": jnp.linspace(-1, 1, 8),
        "sinks/0": jax.random.normal(key, (4, 8)),
        "alibi_slopes/shared": jnp.linspace(0.1, 0.5, 8),
        "alibi_slopes/0": jax.random.uniform(key, (4, 8)),
    }
    return tried


OPTIONS: dict[str, dict[str, Any]] = {
    "key_value_seq_lengths": {"is_causal": True, "causal_alignment": "bottom_right"},
    "causal_alignment": {"is_causal": True, "local_window_size": (9, None)},
    "bias": {"logits_soft_cap": 2.0},
}


def packed(mesh: jax.sharding.Mesh, spec: P) -> dict[str, Any]:
    """Rows of packed sequences: a call under vmap, whose mapped axis is sharded."""
    operands = arrays(2)
    cu = jnp.array([[0, 10, 10, 64], [0, 0, 5, 50], [0, 20, 40, 60], [0, 1, 2, 3]])

    @jax.jit
    def call(cu, q, k, v, out_grad):
        def row(q, k, v, cu):
            return attn_dispatch.ragged_dot_product_attention(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=64, max_seqlen_kv=64,
                is_causal=True,
            )  # fmt: skip

        out, pull = jax.vjp(lambda q, k, v: jax.vmap(row)(q, k, v, cu), q, k, v)
        return out, *pull(out_grad)

    sharded = [place(x, mesh, spec) for x in operands]
    return compared(call, cu, *sharded, plain=(cu, *operands))


def with_dropout(mesh: jax.sharding.Mesh) -> float:
    """XLA partitions this call; one call per shard would draw the first rows' mask everywhere."""
    operands = arrays(2)
    options: dict[str, Any] = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    call = jax.jit(lambda *x: step(*x, **options))
    return error(call(*(place(x, mesh, P("x", None, "y")) for x in operands)), call(*operands))


def main() -> None:
    auto = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    report: dict[str, Any] = {
        f"{name}-{kv_heads}": under_jit(auto, kv_heads, spec)
        for kv_heads in (8, 2, 1)
        for name, spec in SHARDINGS.items()
    }
    with jax.set_mesh(explicit):
        report["explicit"] = under_jit(explicit, 4, P("x"))
    for name, x in operands_to_try().items():
        for sharding in ("batch", "batch_and_heads", "heads_over_both"):
            kv_heads = 8 if sharding == "heads_over_both" else 2
            report[f"{name}-{sharding}"] = with_operand(
                auto, name.split("/")[0], x, SHARDINGS[sharding], kv_heads
            )
    report["packed-batch"] = packed(auto, SHARDINGS["batch_over_both"])
    report["packed-heads"] = packed(auto, SHARDINGS["heads"])
    report["dropout"] = with_dropout(auto)
    report["shard_map"] = under_shard_map(auto)
    report["shard_map_window"] = under_shard_map(auto, local_window_size=5)
    report["shard_map_bias"] = shared_bias_under_shard_map(auto)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
