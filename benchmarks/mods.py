"""Speed of score_mod and mask_mod on one GPU, beside the call without them and XLA.

Mods of `attn_dispatch.mods` at 8,192 tokens, forward and with the gradients of query, key and
value; in the rows "learned" also with the gradients of the arrays that the mod reads. All run in
bfloat16 and take turns. T5's table has two heads, because the rewrite makes no bias of more than
2^27 pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Script, compared, normal

from attn_dispatch import dot_product_attention, mods
from attn_dispatch.implementation import ImplementationName
from attn_dispatch_tools.bench.peers.peer import first_line

SIZE = {"b": 1, "t": 8192, "n": 16, "k": 4, "h": 128}
CAUSAL: dict[str, Any] = {"is_causal": True}
_SLOPES = 2.0 ** -jnp.arange(0.5, 8.5, 0.5)
_TABLE = jnp.linspace(-1.0, 1.0, 64).reshape(32, 2)
_IDS = jnp.arange(SIZE["t"])[None] // 1024

Options = Callable[..., dict[str, Any]]
"""The call's options, made of the array that its mod reads where there is one."""


def _alibi(slopes: Any) -> dict[str, Any]:
    return {"score_mod": mods.alibi(slopes), **CAUSAL}


def _t5(table: Any) -> dict[str, Any]:
    return {"score_mod": mods.relative_position(table, bidirectional=False), **CAUSAL}


CALLS: dict[str, tuple[Options, jax.Array | None, dict[str, int]]] = {
    "causal": (lambda: CAUSAL, None, {}),
    "full": (dict, None, {}),
    "soft cap": (lambda: {"score_mod": mods.soft_cap(30.0), **CAUSAL}, None, {}),
    "logits_soft_cap": (lambda: {"logits_soft_cap": 30.0, **CAUSAL}, None, {}),
    "ALiBi": (lambda: _alibi(_SLOPES), None, {}),
    "alibi_slopes": (lambda: {"alibi_slopes": _SLOPES, **CAUSAL}, None, {}),
    "prefix LM": (lambda: {"mask_mod": mods.prefix_lm(jnp.array([1000]))}, None, {}),
    "documents": (lambda: {"mask_mod": mods.document_mask(_IDS), **CAUSAL}, None, {}),
    "dilated window": (lambda: {"mask_mod": mods.dilated_window(512, 4), **CAUSAL}, None, {}),
    "chunked window": (lambda: {"mask_mod": mods.chunked_window(1024), **CAUSAL}, None, {}),
    "ALiBi, learned": (_alibi, _SLOPES, {}),
    "T5, learned": (_t5, _TABLE, {"n": 2, "k": 1}),
    "T5 in bfloat16, learned": (_t5, _TABLE.astype(jnp.bfloat16), {"n": 2, "k": 1}),
}
"""Options, the array that is learned, and the sizes that differ from `SIZE`."""


def programs(
    options: Options, implementation: ImplementationName | None
) -> dict[str, Callable[..., Any]]:
    """The jitted call and its gradients, functions of query, key, value and what the mod reads."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *read: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, implementation=implementation, **options(*read))

    def gradients(out_grad: jax.Array, *given: jax.Array):
        return jax.vjp(call, *given)[1](out_grad)

    return {"forward": jax.jit(call), "forward_backward": jax.jit(gradients)}


def measure(name: str, args: Any) -> dict[str, Any]:
    """By direction, the times of the kernel, of XLA and of the same call without mods."""
    options, array, smaller = CALLS[name]
    read = [] if array is None else [array]
    b, t, n, k, h = (SIZE | smaller).values()
    *given, out_grad = normal(*((b, t, heads, h) for heads in (n, k, k, n)))
    is_causal = "is_causal" in options(*read)
    # With a gradient of what the mod reads, XLA must be allowed: XLA computes that gradient.
    made = {
        "cudnn": (programs(options, None if read else "cudnn"), read),
        "xla": (programs(options, "xla"), read),
        "without": (programs(lambda: {"is_causal": is_causal}, "cudnn"), []),
    }
    row: dict[str, Any] = {}
    for direction, first in (("forward", []), ("forward_backward", [out_grad])):
        run = {x: (y[direction], [*first, *given, *more]) for x, (y, more) in made.items()}
        try:
            found = compared(run, args, {"cudnn": "without", "xla": "cudnn"})
        except NotImplementedError as error:
            found = {"refused": first_line(error)}
        row |= {f"{direction}, {x}": y for x, y in found.items()}
    return row


def main() -> None:
    script = Script("mods", __doc__, rounds=3, seconds=0.05)
    args = script.start()
    for name in script.chosen(CALLS):
        script.keep("calls", name, measure(name, args))


if __name__ == "__main__":
    main()
