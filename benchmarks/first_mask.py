"""The time that JAX takes to trace and lower the first call of a new mask, without a GPU.

Each measurement is of a mask that the process has not seen: another mask_mod, another window or
another limit of documents. As there is one causal mask, it has another length, of which another
mask was seen before, or none ("another length"). Masks are lowered for the target, by
FlashAttention-4's compiled kernels, and XLA does not compile them: what that takes comes on top, as
for every program. Calls of `flash` and of `jax.nn` on cuDNN take turns with them.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from harness import Script

import attn_dispatch
from attn_dispatch import dot_product_attention
from attn_dispatch.core import jax_compat
from attn_dispatch.implementation import ImplementationName

LENGTH = 8192
_ARRAY = jax.ShapeDtypeStruct
_PREFIX, _IDS = _ARRAY((1,), jnp.int32), _ARRAY((1, LENGTH), jnp.int32)
_CAUSAL: dict[str, Any] = {"is_causal": True}

Case = tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]
"""A function of query, key, value and other arrays, and what these others are."""


def mod_of(number: int) -> Callable[..., Any]:
    def mod(b: Any, n: Any, t: Any, s: Any, prefix: Any) -> Any:
        return (s <= t) & (t - s < 2000 + number) | (s < prefix[b])

    return mod


def mask_mod(number: int) -> Case:
    call = partial(dot_product_attention, mask_mod=mod_of(number), implementation="fa4")
    return lambda q, k, v, prefix: call(q, k, v, mask_mod_args=(prefix,)), (_PREFIX,)


def window(number: int, implementation: ImplementationName = "fa4") -> Case:
    size, options = (1000 + number, 0), _CAUSAL | {"implementation": implementation}
    return partial(dot_product_attention, local_window_size=size, **options), ()


def causal(number: int, implementation: ImplementationName = "fa4") -> Case:
    return partial(dot_product_attention, implementation=implementation, **_CAUSAL), ()


def documents(number: int, implementation: ImplementationName = "fa4") -> Case:
    options = _CAUSAL | {"max_segments": 100 + number, "implementation": implementation}

    def call(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        given = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        return dot_product_attention(q, k, v, **given, **options)

    return call, (_IDS,)


def jax_nn(number: int) -> Case:
    return partial(jax.nn.dot_product_attention, implementation="cudnn", **_CAUSAL), ()


def masked_jax_nn(number: int) -> Case:
    """The mask of `mask_mod` as an array, which `jax.nn` takes."""
    mod = mod_of(number)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, prefix: jax.Array) -> jax.Array:
        b, _, t, s = jnp.ogrid[: q.shape[0], :1, : q.shape[1], : k.shape[1]]
        mask = mod(b, 0, t, s, prefix)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")

    return call, (_PREFIX,)


CASES: dict[str, Callable[[int], Case]] = {
    "mask_mod": mask_mod,
    "window": window,
    "causal": causal,
    "documents": documents,
    "causal, another length": causal,
    "window, flash": partial(window, implementation="flash"),
    "causal, flash": partial(causal, implementation="flash"),
    "documents, flash": partial(documents, implementation="flash"),
    "causal, jax.nn": jax_nn,
    "mask_mod, jax.nn": masked_jax_nn,
}


def first_call(
    name: str, number: int, target: str, *, has_gradients: bool, length: int = LENGTH
) -> dict[str, float]:
    """Milliseconds of tracing and of lowering."""
    call, others = CASES[name](number)
    arrays = [_ARRAY((1, length, n, 128), jnp.bfloat16) for n in (32, 8, 8)]

    def step(*arrays: jax.Array) -> Any:
        if not has_gradients:
            return call(*arrays)
        out, pull = jax.vjp(lambda *x: call(*x, *arrays[3:]), *arrays[:3])
        return out, pull(out)

    gc.collect()
    with attn_dispatch.target(target), jax_compat.tracing_for_nvidia((9, 0)):
        times = [time.perf_counter()]
        traced = jax.jit(step).trace(*arrays, *others)
        times.append(time.perf_counter())
        traced.lower(lowering_platforms=("cuda",))
        times.append(time.perf_counter())
    return {"trace": 1e3 * (times[1] - times[0]), "lower": 1e3 * (times[2] - times[1])}


def new_call(name: str, number: int, target: str, *, has_gradients: bool) -> dict[str, float]:
    """The same of a mask that is new to the process."""
    if not name.startswith("causal"):
        return first_call(name, number, target, has_gradients=has_gradients)
    length = LENGTH + 256 * (number + 1)
    if name == "causal":
        first_call("mask_mod", number, target, has_gradients=has_gradients, length=length)
    elif name == "causal, another length":
        length += 128
    return first_call(name, number, target, has_gradients=has_gradients, length=length)


def _runs(name: str, target: str) -> bool:
    try:
        new_call(name, 0, target, has_gradients=True)
    except NotImplementedError as error:
        print(f"{name} is left out: {error}")
        return False
    return True


def main() -> None:
    script = Script("first_mask", __doc__)
    script.parser.add_argument("--target", default="sm90")
    script.parser.add_argument("--masks", type=int, default=15)
    args = script.start()
    found: dict[str, list[dict[str, float]]] = {}
    names = [name for name in script.chosen(CASES) if _runs(name, args.target)]
    for i in range(1, args.masks + 1):
        for has_gradients in (False, True):
            for name in names:
                number = 2 * i + has_gradients
                row = new_call(name, number, args.target, has_gradients=has_gradients)
                title = f"{name}, with gradients" if has_gradients else name
                found.setdefault(title, []).append(row | {"total": sum(row.values())})
    for name, rows in found.items():
        row = {x: statistics.median(row[x] for row in rows) for x in rows[0]}
        script.keep("milliseconds", name, row)


if __name__ == "__main__":
    main()
