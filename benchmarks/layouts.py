"""The operations that XLA adds around our call if operands are not separate arrays [B, T, N, H].

usage: python benchmarks/layouts.py [--rounds N] [--seconds S] [--out FOLDER]

In the optimized program, each operand of the custom calls is traced back through bitcasts to the
operation that makes it, and each result to the operations that use it: an argument or result of the
program, a matrix product, or a copy, with its shape. Times are compared with those of the same call
on separate arrays, of the same layer with separate projections or, for a cache in pages, of
separate pages [P, page, K, H]. All take turns in one run; bfloat16, causal.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from timing import by_turns, median_ratio

import attn_dispatch
from attn_dispatch_tools.reports.environment import environment

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


def program(form: Form, direction: str) -> Any:
    """The jitted forward call of a form, or the call with its gradients."""
    if direction == "forward":
        return jax.jit(form.function)

    def both(*arrays: jax.Array):
        out, pull = jax.vjp(form.function, *arrays)
        return out, *pull(out)

    return jax.jit(both)


@dataclass(frozen=True)
class Instruction:
    shape: str
    op: str
    operands: tuple[str, ...]
    line: str


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%?[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_TRANSPARENT = ("bitcast", "get-tuple-element", "tuple", "reshape")


def around(hlo: str, target: str = "attn_dispatch_cudnn") -> list[str]:
    """A line for each custom call of ours: what makes its operands, and what uses its results."""
    found = []
    for computation in _computations(hlo).values():
        for name, x in computation.items():
            if x.op != "custom-call" or f'custom_call_target="{target}' not in x.line:
                continue
            kind = re.search(r'custom_call_target="([^"]*)"', x.line)
            makers = [_maker(computation, hlo, y) for y in x.operands]
            users = sorted(set(_users(computation, hlo, name)))
            line = f"{kind[1] if kind else '?'}: of {', '.join(makers)}; to {', '.join(users)}"
            found.append(line)
    return found


def large(hlo: str, elements: int) -> list[str]:
    """A line for each other operation, bitcasts excepted, whose result has that many elements."""
    found = []
    entry = next(x for x in hlo.splitlines() if x.startswith("ENTRY"))
    for x in _computations(hlo)[entry.replace("ENTRY ", "").split()[0]].values():
        sizes = [math.prod(map(int, y.split(","))) for y in re.findall(r"\[([\d,]+)\]", x.shape)]
        is_ours = x.op in (*_TRANSPARENT, "parameter", "custom-call")
        if not is_ours and max(sizes, default=0) >= elements:
            found.append(f"and {_described(x, hlo)}")
    return found


def _computations(hlo: str) -> dict[str, dict[str, Instruction]]:
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in hlo.splitlines():
        if line.rstrip().endswith("{") and " = " not in line.split("(")[0]:
            words = line.replace("ENTRY ", "").split()
            found[words[0]] = current = {}
        elif match := _INSTRUCTION.match(line):
            name, shape, op, rest = match.groups()
            operands = re.findall(r"%[\w.\-]+", _inside_parentheses(rest))
            current[name] = Instruction(shape, op, tuple(operands), line)
    return found


def _inside_parentheses(rest: str) -> str:
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:index]
    return rest


def _maker(computation: dict[str, Instruction], hlo: str, name: str) -> str:
    x = computation.get(name)
    while x is not None and x.op in _TRANSPARENT and x.operands:
        x = computation.get(x.operands[0])
    return "?" if x is None else _described(x, hlo)


def _users(computation: dict[str, Instruction], hlo: str, name: str) -> Iterator[str]:
    for user, x in computation.items():
        if name in x.operands:
            through = x.op in _TRANSPARENT
            further = tuple(_users(computation, hlo, user)) if through else (_described(x, hlo),)
            yield from further or ("a result",)


def _described(x: Instruction, hlo: str) -> str:
    """The instruction's kind and shape; for a fusion, the kinds of those inside that move data."""
    kind = x.op
    if kind == "fusion" and (called := re.search(r"calls=(%[\w.\-]+)", x.line)):
        inside = {y.op for y in _computations(hlo).get(called[1], {}).values()}
        moves = sorted(inside & {"copy", "transpose", "slice", "dynamic-slice", "concatenate"})
        kind = f"fusion({' '.join(moves) or 'no copies'})"
    if kind == "custom-call" and (target := re.search(r'custom_call_target="([^"]*)"', x.line)):
        kind = target[1]
    return f"{kind} {x.shape.split('{')[0] if x.shape[0] != '(' else '(…)'}"


def _arrays(shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True)]


def main() -> None:
    args = arguments("Operands that are not separate arrays.", rounds=6, seconds=0.1)
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    report: dict[str, Any] = {"environment": facts}
    for part, forms in (("forward", FORMS), ("forward_backward", FORMS), ("pages", PAGES)):
        direction = "forward" if forms is PAGES else part
        programs = {
            name: (program(form, direction), _arrays(form.shapes)) for name, form in forms.items()
        }
        times = by_turns(programs, args.rounds, args.seconds)
        rows = report[part] = {}
        for name, form in forms.items():
            function, arrays = programs[name]
            hlo = function.lower(*arrays).compile().as_text()
            lines = around(hlo)
            rows[name] = {
                "us": 1e6 * statistics.median(times[name]),
                "over": median_ratio(times, name, form.beside),
                "beside": form.beside,
                "around": lines,
                "large": large(hlo, max(math.prod(x) for x in form.shapes) // 2),
            }
            row = rows[name]
            print(f"{part} {name}: {row['us']:.0f} us, {row['over']:.3f} of {form.beside}")
            print(*(f"    {x}" for x in (*lines, *row["large"])), sep="\n", flush=True)
    save("layouts", report, args.out)


if __name__ == "__main__":
    main()
