"""How often a kernel runs in a scan over layers, and how long a training step takes.

usage: python benchmarks/scan.py [--rounds N] [--seconds S] [--out FOLDER]

The gradient of 8 causal attention layers in bfloat16, [4, 4096, 16, 128], through this package and
through `jax.nn.dot_product_attention` on cuDNN: in a `lax.scan`, and written one after the other.
The forward kernels are counted in the optimized HLO: XLA of JAX 0.11.2 would run those that come
through its foreign function interface twice in a scan (core/primitive.py). Gradients are compared
with those of jax.nn; the order in which cuDNN adds them is not always the same.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from timing import by_turns, median_ratio

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.reports.environment import environment

LAYERS, BATCH, LENGTH, HEADS, HEAD_DIM = 8, 4, 4096, 16, 128
ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "ours": dot_product_attention,
    "jax.nn": partial(jax.nn.dot_product_attention, implementation="cudnn"),
}
_FORWARD = re.compile(r'custom_call_target="(?:attn_dispatch_cudnn_forward|__cudnn\$fmhaSoftmax)"')


def layer(
    attention: Callable[..., jax.Array], x: jax.Array, weights: Any
) -> tuple[jax.Array, None]:
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights["qkv"])
    out = attention(q, k, v, is_causal=True)
    return x + jnp.einsum("btnh,nhd->btd", out, weights["out"]), None


def loss(
    attention: Callable[..., jax.Array], weights: Any, x: jax.Array, *, scan: bool
) -> jax.Array:
    step = partial(layer, attention)
    if scan:
        x, _ = jax.lax.scan(step, x, weights)
    else:
        for i in range(LAYERS):
            x, _ = step(x, jax.tree.map(itemgetter(i), weights))
    return (x.astype(jnp.float32) ** 2).mean()


def arrays() -> tuple[Any, jax.Array]:
    """The weights of all layers, and what the first one reads."""
    width, keys = HEADS * HEAD_DIM, jax.random.split(jax.random.key(0), 3)
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    weights = {
        "qkv": 0.02 * draw(keys[0], (LAYERS, 3, width, HEADS, HEAD_DIM)),
        "out": 0.02 * draw(keys[1], (LAYERS, HEADS, HEAD_DIM, width)),
    }
    return weights, draw(keys[2], (BATCH, LENGTH, width))


def forward_kernels(program: Any) -> int:
    """The forward kernels in a program; those in a loop count once."""
    return len(_FORWARD.findall(program.as_text()))


def compared(found: Any, expected: Any) -> float:
    """The largest difference of two gradients, as a share of the largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_difference(*(np.asarray(x, np.float32) for x in pair)) for pair in pairs)


def _difference(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.abs(x - y).max() / np.abs(y).max())


def main() -> None:
    args = arguments("Training steps of a scan over attention layers.", rounds=6, seconds=0.5)
    facts, given = environment(), arrays()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    programs, rows = {}, []
    for name, attention in ATTENTION.items():
        for form in ("scan", "written out"):
            step = jax.grad(partial(loss, attention, scan=form == "scan"))
            program = jax.jit(step).lower(*given).compile()
            programs[f"{name}, {form}"] = (program, given)
    expected = programs["jax.nn, written out"][0](*given)
    times = by_turns(programs, args.rounds, args.seconds)
    print("a gradient: ms, time over ours in a scan, forward kernels, difference from jax.nn")
    for name, (program, _) in programs.items():
        row = {
            "program": name,
            "ms": 1e3 * statistics.median(times[name]),
            "over_ours": median_ratio(times, name, "ours, scan"),
            "forward_kernels": forward_kernels(program),
            "difference": compared(program(*given), expected),
        }
        rows.append(row)
        print(
            f"  {name:20} {row['ms']:7.2f} {row['over_ours']:6.3f} {row['forward_kernels']:3}"
            f" {row['difference']:9.1e}"
        )
    save("scan", {"environment": facts, "programs": rows}, args.out)


if __name__ == "__main__":
    main()
