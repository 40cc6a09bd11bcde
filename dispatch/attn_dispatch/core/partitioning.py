"""Attention on arrays sharded under `jit`: batch and kv heads stay sharded, nothing is gathered.

The partitioner is told by a Shardy rule which axes go together; each device then computes an
ordinary, smaller call, whose lowering makes its own spec. The gradient of what several devices
share (a bias of batch 1) is the sum of what they compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.jax_compat import custom_partitioning

Bind = Callable[..., list[jax.Array]]

# Axes by letter, as in spec.py; n is (k g): a shard has whole groups of query heads. There is no
# dropout_key: a shard would draw the mask of the first batch rows and heads.
_LAYOUTS = {
    "query": "b t n h",
    "key": "b s k h",
    "value": "b s k v",
    "bias": "b n t s",
    "mask": "b n t s",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_segment_ids": "b t",
    "key_value_segment_ids": "b s",
    "cu_seqlens_q": "b m",
    "cu_seqlens_kv": "b m",
    "alibi_slopes": "b n",
    "sinks": "b n",
    "out": "b t n v",
    "out_grad": "b t n v",
    "lse": "b n t",
    "lse_grad": "b n t",
    "row_max": "b n t",
    "keep": "b n t s",
}


def can_partition(spec: AttentionSpec) -> bool:
    """Whether every operand has a layout here; XLA partitions other calls as it sees fit."""
    return not spec.is_empty and all(operand.name in _LAYOUTS for operand in spec.operands)


def partitioned(bind: Bind, spec: AttentionSpec, operands: tuple[jax.Array, ...]) -> Any:
    """bind(*operands), each device binding its own shard where the operands are sharded."""
    return _partitioner(bind, _Call.of(spec))(*operands)


@dataclass(frozen=True)
class _Call:
    """What of a call the partitioner must know."""

    inputs: tuple[str, ...]
    """The layout of each operand: its axes by name."""
    outputs: tuple[str, ...]
    shared: tuple[str, ...]
    """For each result which of "b" and "n" its call has and it has not: it is a sum over them."""
    batch: int
    kv_heads: int
    groups: int

    @staticmethod
    def of(spec: AttentionSpec) -> _Call:
        layouts = {x.name: _layout(spec, x.name, x.shape) for x in spec.operands}
        outputs = tuple(layouts.get(name, _LAYOUTS[name]) for name in spec.result_names)
        return _Call(
            inputs=tuple(layouts.values()),
            outputs=outputs,
            shared=tuple(
                "".join(x for x in "bn" if x in _LAYOUTS[name] and x not in layout.split())
                for name, layout in zip(spec.result_names, outputs, strict=True)
            ),
            batch=spec.batch,
            kv_heads=spec.num_kv_heads,
            groups=spec.num_heads // spec.num_kv_heads,
        )


def _layout(spec: AttentionSpec, name: str, shape: tuple[int, ...]) -> str:
    """The axes of an operand; one that is broadcast along goes together with no other."""
    full = {"b": spec.batch, "n": spec.num_heads, "t": spec.seq_len_q, "s": spec.seq_len_kv}
    position = spec.options.operands.index(name)
    return " ".join(
        f"u{position}{letter}" if size == 1 and full.get(letter, 1) != 1 else letter
        for letter, size in zip(_LAYOUTS[name].split(), shape, strict=True)
    )


@lru_cache(maxsize=4096)
def _partitioner(bind: Bind, call: _Call) -> Callable[..., Any]:
    def axes_of(mesh: Any, query: P) -> dict[str, tuple[str, ...]]:
        """The mesh axes that shard batch and heads: those of query, as far as they divide."""
        by_batch, _, by_heads, _ = (*query, None, None, None, None)[:4]
        heads = _dividing(mesh, by_heads, call.kv_heads)
        return {"b": _dividing(mesh, by_batch, call.batch), "n": heads, "k": heads}

    def shardings(layouts: tuple[str, ...], mesh: Any, query: P) -> tuple[NamedSharding, ...]:
        """Shardings that shard batch and heads as query's, and nothing else."""
        axes = axes_of(mesh, query)
        return tuple(
            NamedSharding(mesh, P(*(axes.get(letter) for letter in layout.split())))
            for layout in layouts
        )

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        query = args[0].sharding.spec
        axes = axes_of(mesh, query)
        over = [tuple(x for letter in shared for x in axes[letter]) for shared in call.shared]

        def shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(_sum(x, y) for x, y in zip(bind(*operands), over, strict=True))

        to = shardings(call.outputs, mesh, query)
        return mesh, shard, to, shardings(call.inputs, mesh, query)

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        return shardings(call.outputs, mesh, args[0].sharding.spec)

    whole = custom_partitioning(lambda *operands: tuple(bind(*operands)))
    whole.def_partition(partition, infer_sharding_from_operands=infer, **_rule(call))
    return whole


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over the devices along these mesh axes; 16-bit numbers are added up as float32."""
    if not axes:
        return x
    return jax.lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axes).astype(x.dtype)


def _dividing(mesh: Any, axes: Any, size: int) -> tuple[str, ...]:
    """The leading mesh axes that together divide `size`: a shard has whole kv heads."""
    axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    while size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _rule(call: _Call) -> dict[str, Any]:
    """The sharding rule, for example "b t (k g) h, b s k h, b s k v -> b t (k g) v, b (k g) t"."""
    grouped = call.groups > 1 and call.kv_heads > 1
    heads = "(k g)" if grouped else "k" if call.groups == 1 else "g"
    text = " -> ".join(
        ", ".join(re.sub(r"\bn\b", heads, layout) for layout in side)
        for side in (call.inputs, call.outputs)
    )
    # The partitioner wants them in order of appearance.
    factors = dict.fromkeys(re.findall(r"\w+", text))
    replicated = tuple(factor for factor in factors if factor not in ("b", "k"))
    sizes = {"g": call.groups} if grouped else {}
    return {"sharding_rule": text, "need_replication_factors": replicated, **sizes}
