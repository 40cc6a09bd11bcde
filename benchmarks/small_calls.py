"""The wall time of small calls, which launching takes longer than computing.

usage: python benchmarks/small_calls.py [--rounds N] [--seconds S] [--out FOLDER]

Microseconds of a call alone, forward and with gradients, and of each of 12 calls with gradients in
one program, in which each takes the result of the one before. Implementations that cannot run here
are left out. On one GPU it takes about a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from timing import by_turns

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.bench.peers.peer import why_absent
from attn_dispatch_tools.reports.environment import environment

SHAPES = ((1, 128, 8, 64), (1, 512, 8, 64), (8, 512, 8, 64))
LAYERS = 12

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attentions() -> dict[str, Attention]:
    """The functions that take turns."""
    causal: dict[str, Any] = {"is_causal": True}
    found: dict[str, Attention] = {"ours": partial(dot_product_attention, **causal)}
    for name in ("cudnn", "flash", "fa4", "xla"):
        found[name] = partial(dot_product_attention, implementation=name, **causal)
    for name in ("cudnn", "xla"):
        found[f"jax.nn {name}"] = partial(
            jax.nn.dot_product_attention, implementation=name, **causal
        )
    if not why_absent("dew_flash_attn", "dew-flash-attn-cu13"):
        import dew_flash_attn

        found["dew"] = partial(dew_flash_attn.flash_mha, **causal)
    return found


def programs(attention: Attention) -> dict[str, Any]:
    """The programs that are timed: functions of query, key, value and the gradient of out."""

    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            q = attention(q, k, v)
        return q

    def with_gradients(function: Attention) -> Any:
        def step(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array):
            out, pull = jax.vjp(function, q, k, v)
            return out, pull(out_grad)

        return step

    return {
        "forward": lambda q, k, v, out_grad: attention(q, k, v),
        "f+b": with_gradients(attention),
        f"f+b, each of {LAYERS}": with_gradients(layers),
    }


def microseconds(shape: tuple[int, ...], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians by program and function; a function that fails has the reason."""
    arrays = [
        jax.random.normal(x, shape, jnp.bfloat16) for x in jax.random.split(jax.random.key(0), 4)
    ]
    compiled: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, attention in attentions().items():
        for kind, program in programs(attention).items():
            try:
                function = jax.jit(program)
                jax.block_until_ready(function(*arrays))
            except Exception as error:
                found.setdefault("left out", {})[name] = str(error).splitlines()[0][:200]
                break
            compiled.setdefault(kind, {})[name] = function, arrays
    for kind, functions in compiled.items():
        times = by_turns(functions, rounds, seconds)
        count = LAYERS if str(LAYERS) in kind else 1
        found[kind] = {x: 1e6 * statistics.median(y) / count for x, y in times.items()}
    return found


def main() -> None:
    args = arguments("The wall time of small calls.", rounds=8, seconds=0.02)
    rows = {}
    for shape in SHAPES:
        rows[str(shape)] = found = microseconds(shape, args.rounds, args.seconds)
        for kind, times in found.items():
            shown = times if kind == "left out" else {x: round(y, 1) for x, y in times.items()}
            print(shape, kind, shown, flush=True)
    save("small_calls", {"environment": environment(), "microseconds": rows}, args.out)


if __name__ == "__main__":
    main()
