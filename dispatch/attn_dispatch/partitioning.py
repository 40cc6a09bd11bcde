"""Attention on arrays sharded under `jit`: batch and kv heads stay sharded, nothing is gathered.

The partitioner is told by a Shardy rule which axes go together; each device then computes an
ordinary, smaller call, whose lowering makes its own spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch.spec import AttentionSpec

Bind = Callable[..., list[jax.Array]]

# Axes by letter, as in spec.py; n is (k g): a shard has whole groups of query heads.
_LAYOUTS = {
    "query": "b t n h",
    "key": "b s k h",
    "value": "b s k v",
    "out": "b t n v",
    "out_grad": "b t n v",
    "lse": "b n t",
    "lse_grad": "b n t",
}


def can_partition(spec: AttentionSpec) -> bool:
    """Whether every operand has a layout here; XLA partitions other calls as it sees fit."""
    return not spec.is_empty and all(operand.name in _LAYOUTS for operand in spec.operands)


def partitioned(bind: Bind, spec: AttentionSpec, operands: tuple[jax.Array, ...]) -> Any:
    """bind(*operands), each device binding its own shard where the operands are sharded."""
    inputs, outputs = _layouts(spec)
    groups = spec.num_heads // spec.num_kv_heads
    return _partitioner(bind, inputs, outputs, spec.batch, spec.num_kv_heads, groups)(*operands)


def _layouts(spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs = tuple(_LAYOUTS[name] for name in spec.options.operands)
    if spec.is_backward:
        return inputs, tuple(_LAYOUTS[name] for name in spec.options.gradients)
    return inputs, tuple(_LAYOUTS[name] for name in ("out", "lse")[: len(spec.results)])


@lru_cache(maxsize=4096)
def _partitioner(
    bind: Bind,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    batch: int,
    kv_heads: int,
    groups: int,
) -> Callable[..., Any]:
    def shardings(layouts: tuple[str, ...], mesh: Any, query: P) -> tuple[NamedSharding, ...]:
        """Shardings that shard batch and heads as query's, and nothing else."""
        by_batch, _, by_heads, _ = (*query, None, None, None, None)[:4]
        heads = _dividing(mesh, by_heads, kv_heads)
        axes = {"b": _dividing(mesh, by_batch, batch), "n": heads, "k": heads}
        return tuple(
            NamedSharding(mesh, P(*(axes.get(letter) for letter in layout.split())))
            for layout in layouts
        )

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        query = args[0].sharding.spec
        to = shardings(outputs, mesh, query)
        return mesh, lambda *shards: tuple(bind(*shards)), to, shardings(inputs, mesh, query)

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        return shardings(outputs, mesh, args[0].sharding.spec)

    call = custom_partitioning(lambda *operands: tuple(bind(*operands)))
    call.def_partition(
        partition, infer_sharding_from_operands=infer, **_rule(inputs, outputs, kv_heads, groups)
    )
    return call


def _dividing(mesh: Any, axes: Any, size: int) -> tuple[str, ...]:
    """The leading mesh axes that together divide `size`: a shard has whole kv heads."""
    axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    while size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _rule(
    inputs: tuple[str, ...], outputs: tuple[str, ...], kv_heads: int, groups: int
) -> dict[str, Any]:
    """The sharding rule, for example "b t (k g) h, b s k h, b s k v -> b t (k g) v, b (k g) t"."""
    grouped = groups > 1 and kv_heads > 1
    heads = "(k g)" if grouped else "k" if groups == 1 else "g"
    text = " -> ".join(
        ", ".join(layout.replace("n", heads) for layout in side) for side in (inputs, outputs)
    )
    replicated = [letter for letter in ("t", "g", "h", "s", "v") if letter in text]
    # The partitioner wants them in order of appearance.
    replicated.sort(key=text.index)
    sizes = {"g": groups} if grouped else {}
    return {"sharding_rule": text, "need_replication_factors": tuple(replicated), **sizes}
