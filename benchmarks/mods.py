"""Speed of score_mod and mask_mod on one GPU, compared with the call without them and with XLA.

usage: python benchmarks/mods.py [--rounds N] [--seconds S] [--out FOLDER]

Measures mods of `attn_dispatch.mods` at 8,192 tokens, forward and with the gradients of query, key
and value; in the rows "learned" also with the gradients of the arrays that the mod reads. All run
in bfloat16 in the same process. T5's table has two heads, because the rewrite makes no bias of more
than 2^27 pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from timing import by_turns, median_ratio

from attn_dispatch import dot_product_attention, mods
from attn_dispatch.implementation import ImplementationName
from attn_dispatch_tools.reports.environment import environment

_SIZE = {"b": 1, "t": 8192, "n": 16, "k": 4, "h": 128}
_SLOPES = 2.0 ** -jnp.arange(0.5, 8.5, 0.5)
_TABLE = jnp.linspace(-1.0, 1.0, 64).reshape(32, 2)
_CAUSAL: dict[str, Any] = {"is_causal": True}


def _alibi(slopes: Any) -> dict[str, Any]:
    return {"score_mod": mods.alibi(slopes), **_CAUSAL}


def _t5(table: Any) -> dict[str, Any]:
    return {"score_mod": mods.relative_position(table, bidirectional=False), **_CAUSAL}


CALLS: dict[str, dict[str, Any]] = {
    "causal": _CAUSAL,
    "full": {},
    "soft cap": {"score_mod": mods.soft_cap(30.0), **_CAUSAL},
    "logits_soft_cap": {"logits_soft_cap": 30.0, **_CAUSAL},
    "ALiBi": _alibi(_SLOPES),
    "alibi_slopes": {"alibi_slopes": _SLOPES, **_CAUSAL},
    "prefix LM": {"mask_mod": mods.prefix_lm(jnp.array([1000]))},
    "documents": {"mask_mod": mods.document_mask(jnp.arange(_SIZE["t"])[None] // 1024), **_CAUSAL},
    "dilated window": {"mask_mod": mods.dilated_window(512, 4), **_CAUSAL},
    "chunked window": {"mask_mod": mods.chunked_window(1024), **_CAUSAL},
}


LEARNED: dict[str, tuple[Callable[[jax.Array], dict[str, Any]], jax.Array, dict[str, int]]] = {
    "ALiBi, learned": (_alibi, _SLOPES, {}),
    "T5, learned": (_t5, _TABLE, {"n": 2, "k": 1}),
    "T5 in bfloat16, learned": (_t5, _TABLE.astype(jnp.bfloat16), {"n": 2, "k": 1}),
}
"""A function that returns the call's options from the array that the mod reads, that array, and the
sizes that differ from `_SIZE`."""


def programs(
    options: Callable[..., dict[str, Any]], implementation: ImplementationName | None
) -> dict[str, Callable[..., Any]]:
    """The jitted call and its gradients, functions of query, key, value and what the mod reads."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *read: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, implementation=implementation, **options(*read))

    def gradients(out_grad: jax.Array, *given: jax.Array):
        return jax.vjp(call, *given)[1](out_grad)

    return {"forward": jax.jit(call), "forward_backward": jax.jit(gradients)}


def arrays(size: dict[str, int]) -> list[jax.Array]:
    """query, key, value and the gradient of the output."""
    z, keys = size, jax.random.split(jax.random.key(0), 4)
    heads = (z["n"], z["k"], z["k"], z["n"])
    return [
        jax.random.normal(key, (z["b"], z["t"], n, z["h"]), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def measure(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """By direction, the time of the kernel, of XLA and of the same call without mods, in
    microseconds, and ratios."""
    if name in LEARNED:
        options, array, size = LEARNED[name]
        read, is_causal = [array], True
    else:
        read, size, is_causal = [], {}, "is_causal" in CALLS[name]
        options = partial(dict, CALLS[name])
    *given, out_grad = arrays(_SIZE | size)
    # With a gradient of what the mod reads, XLA must be allowed: XLA computes that gradient.
    made = {
        "cudnn": (programs(options, None if read else "cudnn"), read),
        "xla": (programs(options, "xla"), read),
        "without": (programs(lambda: {"is_causal": is_causal}, "cudnn"), []),
    }
    row = {}
    for direction, first in (("forward", []), ("forward_backward", [out_grad])):
        run = {x: (y[direction], [*first, *given, *more]) for x, (y, more) in made.items()}
        try:
            times = by_turns(run, rounds, seconds)
        except NotImplementedError as error:
            row[direction] = {"refused": str(error).splitlines()[1].strip()}
            continue
        row[direction] = {f"{name}_us": 1e6 * statistics.median(x) for name, x in times.items()}
        row[direction] |= {
            "over_without": median_ratio(times, "without", "cudnn"),
            "over_xla": median_ratio(times, "xla", "cudnn"),
        }
    return row


def main() -> None:
    args = arguments("Speed of score_mod and mask_mod.", rounds=3, seconds=0.05)
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    print("us with mods on the kernel; time without mods / with mods; time on XLA / on the kernel")
    rows = {}
    for name in (*CALLS, *LEARNED):
        rows[name] = row = measure(name, args.rounds, args.seconds)
        cells = [
            f"{x['cudnn_us']:8.0f} us {x['over_without']:5.2f} {x['over_xla']:6.1f}"
            if "cudnn_us" in x
            else x["refused"][:60]
            for x in row.values()
        ]
        print(f"{name:24s}{'   '.join(cells)}", flush=True)
    save("mods", {"environment": facts, "shape": _SIZE, "calls": rows}, args.out)


if __name__ == "__main__":
    main()
