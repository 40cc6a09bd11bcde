"""A paged call as calls on arrays: the keys of a few batch rows are gathered at a time.

So the memory beside the pages is that of a few rows' keys, not a second copy of all keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import flat_pages, flat_table, gathered, gathered_spec
from attn_dispatch.typed_jax import mapped

Forward = Callable[[AttentionSpec, Operands], tuple[jax.Array, ...]]

GATHERED_BYTES = 2**27
"""The most bytes of keys and values gathered at a time; a single batch row may take more."""


def forward_of_pages(
    spec: AttentionSpec, operands: Operands, forward: Forward
) -> tuple[jax.Array, ...]:
    """The results of a paged call, computed by `forward` on calls that are not paged."""
    part = spec_of_part(spec)
    if part.batch == spec.batch:
        return forward(gathered_spec(spec), gathered(spec, operands))
    one_pool = dict(operands)
    for name in ("key_pages", "value_pages"):
        one_pool[name] = flat_pages(operands[name])[None]
    one_pool["page_table"] = flat_table(spec, operands)
    shared = {name: x for name, x in one_pool.items() if not _has_rows(spec, name)}
    split = {
        name: x.reshape(spec.batch // part.batch, part.batch, *x.shape[1:])
        for name, x in one_pool.items()
        if name not in shared
    }

    def step(of_rows: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        operands = of_rows | shared
        return forward(part, gathered(_paged(spec, operands), operands))

    return tuple(x.reshape(spec.batch, *x.shape[2:]) for x in mapped(step, split))


def spec_of_part(spec: AttentionSpec) -> AttentionSpec:
    """The spec of one part: some batch rows, with their keys gathered."""
    rows, of_all = _rows_at_a_time(spec), gathered_spec(spec)
    operands = tuple(
        replace(x, shape=(rows, *x.shape[1:])) if _has_rows(spec, x.name) else x
        for x in of_all.operands
    )
    return replace(of_all, operands=operands)


def keys_bytes(part: AttentionSpec) -> int:
    """Bytes of the keys and values gathered for a part."""
    return sum(
        math.prod(part.shape(name)) * jnp.dtype(part.dtype).itemsize for name in ("key", "value")
    )


def _paged(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """The spec of the paged call on these operands, of some of the batch rows."""
    shapes = tuple(replace(x, shape=operands[x.name].shape) for x in spec.operands)
    return replace(spec, operands=shapes)


def _rows_at_a_time(spec: AttentionSpec) -> int:
    if spec.symbols or spec.meaning.mods:
        return spec.batch  # a mod counts batch rows from the first
    elements = spec.seq_len_kv * spec.num_kv_heads * (spec.head_dim + spec.head_dim_v)
    fitting = max(GATHERED_BYTES // max(elements * 4, 1), 1)
    return max(d for d in range(1, min(fitting, spec.batch) + 1) if spec.batch % d == 0)


def _has_rows(spec: AttentionSpec, name: str) -> bool:
    if name in ("key", "value"):
        return True
    return name not in ("key_pages", "value_pages") and spec.shape(name)[0] == spec.batch
