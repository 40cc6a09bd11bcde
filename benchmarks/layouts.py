"""The operations that XLA adds around our call if operands are not separate arrays [B, T, N, H].

Times are compared with those of the same call on separate arrays, of the same layer with separate
projections or, for a cache in pages, of separate pages [P, page, K, H]. All take turns; bfloat16,
causal. "added" are the operations of the optimized program beside custom calls whose results are at
least an eighth of the largest argument: copies, and in projections matrix products.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Script, compared, normal

import attn_dispatch

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 4096, 32, 8, 128
WIDTH = 2048
_FUSED = HEADS + 2 * KV_HEADS
_SPLITS = (HEADS, HEADS + KV_HEADS)

Attended = Callable[..., jax.Array]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return attn_dispatch.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn", **options
    )


def contiguous(q, k, v):
    return attend(q, k, v)


def slices_of_heads(qkv):
    """The operands are slices of one array [B, T, N + 2 K, H]."""
    return attend(*jnp.split(qkv, _SPLITS, axis=2))


def slices_of_leading(kv, q):
    """Key and value are slices of one array [2, B, S, K, H]."""
    return attend(q, kv[0], kv[1])


def bnth(q, k, v):
    """The operands and the output are [B, N, T, H], with swapped axes around the call."""
    return jnp.swapaxes(attend(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)


def bnth_by_layout(q, k, v):
    """The operands and the output are [B, N, T, H], and `qkv_layout` says so."""
    return attend(q, k, v, qkv_layout="BNTH")


def _lengths() -> jax.Array:
    return jnp.arange(1, BATCH + 1, dtype=jnp.int32) * (LENGTH // BATCH)


def lengths(q, k, v):
    """The batch rows have lengths."""
    return attend(q, k, v, query_seq_lengths=_lengths(), key_value_seq_lengths=_lengths())


def bnth_lengths_by_layout(q, k, v):
    """The same with operands [B, N, T, H] and `qkv_layout`."""
    n = _lengths()
    return attend(q, k, v, query_seq_lengths=n, key_value_seq_lengths=n, qkv_layout="BNTH")


def paged(kv_layout, q, *pools, swap=False):
    """New queries in each row, and a cache whose pages are in any order. With `swap` the pages are
    first copied to [P, page, K, H], as would be necessary without kv_layout."""
    rows, axis = CACHE_ROWS, 2 if kv_layout == "HND" else 1
    pages = [x[:, i] for x in pools for i in range(2)] if swap and len(pools) == 1 else [*pools]
    if swap and kv_layout == "HND":
        pages, kv_layout = [jnp.swapaxes(x, 1, 2) for x in pages], "NHD"
    keys, values = (pages[0], None) if len(pages) == 1 else pages
    size = pools[0].shape[-3 if axis == 1 else -2]
    table = np.random.default_rng(1).permutation(rows * CACHE_KEYS // size).reshape(rows, -1)
    return attn_dispatch.paged_attention(
        q, keys, values, table.astype(np.int32),
        jnp.full(rows, CACHE_KEYS - 3, jnp.int32), kv_layout=kv_layout, implementation="cudnn",
    )  # fmt: skip


def projections(x, w):
    """The operands are three matrix products."""
    return attend(*(jnp.einsum("btd,dnh->btnh", x, y) for y in jnp.split(w, _SPLITS, axis=1)))


def fused_projection(x, w):
    """The operands are slices of one matrix product [B, T, N + 2 K, H]."""
    return slices_of_heads(jnp.einsum("btd,dnh->btnh", x, w))


def bnth_projections(x, w):
    """The operands are three matrix products [B, N, T, H]."""
    return bnth(*(jnp.einsum("btd,dnh->bnth", x, y) for y in jnp.split(w, _SPLITS, axis=1)))


@dataclass(frozen=True)
class Form:
    function: Attended
    shapes: tuple[tuple[int, ...], ...]
    beside: str
    """The name of the form with whose time this one is compared."""


_Q, _K = (BATCH, LENGTH, HEADS, DIM), (BATCH, LENGTH, KV_HEADS, DIM)
CACHE_ROWS, CACHE_KEYS = 16, 8192
_SWAPPED = tuple((b, n, t, h) for b, t, n, h in (_Q, _K, _K))
_PROJECTED = ((BATCH, LENGTH, WIDTH), (WIDTH, _FUSED, DIM))
FORMS = {
    "contiguous": Form(contiguous, (_Q, _K, _K), "contiguous"),
    "slices of heads": Form(slices_of_heads, ((BATCH, LENGTH, _FUSED, DIM),), "contiguous"),
    "slices of leading": Form(slices_of_leading, ((2, *_K), _Q), "contiguous"),
    "bnth": Form(bnth, _SWAPPED, "contiguous"),
    "projections": Form(projections, _PROJECTED, "projections"),
    "fused projection": Form(fused_projection, _PROJECTED, "projections"),
    "bnth projections": Form(bnth_projections, _PROJECTED, "projections"),
    "bnth, by layout": Form(bnth_by_layout, _SWAPPED, "contiguous"),
    "lengths": Form(lengths, (_Q, _K, _K), "lengths"),
    "bnth lengths, by layout": Form(bnth_lengths_by_layout, _SWAPPED, "lengths"),
}


def _pages(size: int, queries: int) -> dict[str, Form]:
    pages = CACHE_ROWS * CACHE_KEYS // size
    query = (CACHE_ROWS, queries, HEADS, DIM)
    forms = {}
    for layout in ("NHD", "HND"):
        page = (size, KV_HEADS, DIM) if layout == "NHD" else (KV_HEADS, size, DIM)
        two, one = ((pages, *page),) * 2, ((pages, 2, *page),)
        for what, pools in (("", two), (", one pool", one)):
            name = f"pages of {size} {layout}{what}, {queries} queries"
            beside = f"pages of {size} NHD, {queries} queries"
            call = partial(paged, layout)
            forms[name] = Form(call, (query, *pools), beside)
            if queries == 1 and name != beside:
                swapped = partial(paged, layout, swap=True)
                forms[f"{name}, brought to NHD"] = Form(swapped, (query, *pools), beside)
    return forms


PAGES = {
    x: y for size, t in ((16, 1), (64, 1), (64, 4), (64, 256)) for x, y in _pages(size, t).items()
}


def program(form: Form, part: str) -> Any:
    """The jitted forward call of a form, or the call with its gradients."""
    if part != "forward_backward":
        return jax.jit(form.function)

    def both(*arrays: jax.Array):
        out, pull = jax.vjp(form.function, *arrays)
        return out, *pull(out)

    return jax.jit(both)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_FREE = ("bitcast", "get-tuple-element", "tuple", "reshape", "parameter", "custom-call")


def added(hlo: str, elements: int) -> list[str]:
    """The other operations of the program whose results have so many elements, with their shapes.

    XLA names a fusion after what it does.
    """
    found = []
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        if (match := _INSTRUCTION.match(line)) is None or match[3] in _FREE:
            continue
        name, shape, _ = match.groups()
        sizes = [math.prod(map(int, x.split(","))) for x in re.findall(r"\[([\d,]+)\]", shape)]
        if max(sizes, default=0) >= elements:
            found.append(f"{name} {shape.split('{')[0]}")
    return found


def main() -> None:
    script = Script("layouts", __doc__, rounds=6, seconds=0.1)
    args = script.start()
    parts = {"forward": FORMS, "forward_backward": FORMS, "pages": PAGES}
    for part in script.chosen(parts):
        forms = parts[part]
        programs = {
            name: (program(form, part), normal(*form.shapes)) for name, form in forms.items()
        }
        beside = {name: form.beside for name, form in forms.items()}
        for name, row in compared(programs, args, beside).items():
            function, arrays = programs[name]
            hlo = function.lower(*arrays).compile().as_text()
            elements = max(math.prod(x) for x in forms[name].shapes) // 8
            script.keep(part, name, row | {"added": added(hlo, elements)})


if __name__ == "__main__":
    main()
