"""Training steps of a decoder on one long packed row: on one GPU, and spread over all of a host.

The decoder has 16 layers (hidden 2048, 16 query heads on 4, head dim 128, MLP 8192; with embeddings
0.99 billion parameters) in bfloat16. A step is forward, backward and SGD with momentum; a layer
keeps its input and its attention's results for the backward pass and computes the rest again. The
row has 131,072 tokens of twelve documents, the longest 35 % of it. Over several GPUs the row is
sharded by the mesh axis "context", and every GPU has all weights. Both runs begin with the same
weights and see the same tokens, so that their losses can be compared. The share of attention is
the time of its calls alone, forward and backward, over that of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from context_calls import TAIL, Cell
from harness import Script
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model import norm, rotary

from attn_dispatch import dot_product_attention

HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCABULARY = 2048, 16, 4, 128, 8192, 8192
SAVED = jax.checkpoint_policies.save_only_these_names("context")

Weights = dict[str, Any]


def weights_of(layers: int) -> Weights:
    shapes = {
        "q": (HIDDEN, HEADS * DIM), "k": (HIDDEN, KV_HEADS * DIM), "v": (HIDDEN, KV_HEADS * DIM),
        "o": (HEADS * DIM, HIDDEN), "up": (HIDDEN, MLP), "gate": (HIDDEN, MLP),
        "down": (MLP, HIDDEN),
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 2))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[-2] ** -0.5

    found: Weights = {"layers": {name: drawn(layers, *shape) for name, shape in shapes.items()}}
    return found | {"embed": drawn(VOCABULARY, HIDDEN), "output": drawn(HIDDEN, VOCABULARY)}


def row_of(tokens: int) -> dict[str, np.ndarray]:
    """What a data loader yields, [1, tokens] each: tokens, targets, positions and segment ids."""
    ids = Cell("", tokens, (), documents=TAIL).ids()
    assert ids is not None
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (1, tokens + 1)).astype(np.int32)
    starts = np.searchsorted(ids[0], ids[0], side="left")
    return {
        "tokens": drawn[:, :-1], "targets": drawn[:, 1:], "ids": ids,
        "positions": (np.arange(tokens) - starts)[None].astype(np.int32),
    }  # fmt: skip


def attention(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return dot_product_attention(
        q, k, v, is_causal=True, query_segment_ids=ids, max_segments=len(TAIL)
    )


def loss(weights: Weights, row: dict[str, jax.Array]) -> jax.Array:
    """The mean of the tokens' cross entropy."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = norm(x)
        q, k, v = ((y @ w[name]).reshape(1, x.shape[1], -1, DIM) for name in "qkv")
        turned = jax.vmap(rotary)
        out = attention(turned(q, row["positions"]), turned(k, row["positions"]), v, row["ids"])
        x = x + out.reshape(1, x.shape[1], -1) @ w["o"]
        y = norm(x)
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x = weights["embed"][row["tokens"]]
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=SAVED), x, weights["layers"])
    logits = (norm(x) @ weights["output"]).astype(jnp.float32)
    right = jnp.take_along_axis(logits, row["targets"][..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


@partial(jax.jit, donate_argnums=(0, 1))
def step(
    weights: Weights, momentum: Weights, row: dict[str, jax.Array]
) -> tuple[Weights, Weights, jax.Array]:
    value, grads = jax.value_and_grad(loss)(weights, row)
    momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), momentum, grads)
    weights = jax.tree.map(lambda w, m: (w - 0.01 * m).astype(w.dtype), weights, momentum)
    return weights, momentum, value


def attention_seconds(tokens: int, ids: jax.Array, spread: jax.sharding.Sharding) -> float:
    """The time of one layer's attention, forward and backward."""

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, ids), q, k, v)
        return out, pull(grad)

    given = [
        jax.device_put(jnp.ones((1, tokens, n, DIM), jnp.bfloat16), spread)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    jax.block_until_ready(both(*given))
    start = time.perf_counter()
    jax.block_until_ready([both(*given) for _ in range(5)])
    return (time.perf_counter() - start) / 5


def trained(mesh: jax.sharding.Mesh | None, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps on the first GPU, or on those of a mesh."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    whole = one if mesh is None else NamedSharding(mesh, P())
    spread = one if mesh is None else NamedSharding(mesh, P(None, "context"))
    weights = jax.device_put(weights_of(args.layers), whole)
    momentum = jax.device_put(jax.tree.map(jnp.zeros_like, weights), whole)
    row = jax.device_put(row_of(args.tokens), spread)
    losses, seconds = list[float](), list[float]()
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        made = step.lower(weights, momentum, row).compile()
        for _ in range(args.steps):
            start = time.perf_counter()
            weights, momentum, value = made(weights, momentum, row)
            losses.append(float(value))
            seconds.append(time.perf_counter() - start)
        del weights, momentum
        alone = attention_seconds(args.tokens, row["ids"], spread)
    peak = (jax.devices()[-1].memory_stats() or {}).get("peak_bytes_in_use", 0)
    memory = made.memory_analysis()
    assert memory is not None
    median = statistics.median(seconds[1:])
    return {
        "devices": 1 if mesh is None else mesh.devices.size, "losses": losses,
        "seconds": median, "tokens_per_second": args.tokens / median,
        "share_of_attention": args.layers * alone / median,
        "gb_at_the_peak": peak / 1e9,
        "gb_of_a_device": (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 1e9,
    }  # fmt: skip


def main() -> None:
    script = Script("context_step", __doc__)
    script.parser.add_argument("--tokens", type=int, default=131072)
    script.parser.add_argument("--layers", type=int, default=16)
    script.parser.add_argument("--steps", type=int, default=4, help="the first is not timed")
    args = script.start()
    if args.tokens < 1 or args.layers < 1 or args.steps < 2:
        script.parser.error("expected 1 token, 1 layer and 2 steps or more")
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("context",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    shapes = jax.eval_shape(partial(weights_of, args.layers))
    parameters = sum(x.size for x in jax.tree.leaves(shapes))
    script.report |= {"tokens": args.tokens, "layers": args.layers, "parameters": parameters}
    places = {"one GPU": None, "all GPUs": mesh}
    for name in script.chosen(places):
        script.keep("steps", name, trained(places[name], args))


if __name__ == "__main__":
    main()
