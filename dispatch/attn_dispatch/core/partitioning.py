"""Attention on arrays sharded under `jit` along Auto axes: nothing is gathered that need not be.

The partitioner is told by a Shardy rule which axes go together; each device then computes an
ordinary, smaller call, whose lowering makes its own spec. The gradient of what several devices
share (a bias of batch 1, kv heads) is the sum of what they compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from attn_dispatch import settings
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.jax_compat import custom_partitioning, set_xla_metadata
from attn_dispatch.core.mesh_axes import mesh_and_specs
from attn_dispatch.core.shards import Shards, layouts, of_keys, shard_call
from attn_dispatch.core.unsplit import say_unsplit

_NO_MESH = AbstractMesh((), ())


def partitioned(bind: Bind, call: LeadingCall, operands: tuple[jax.Array, ...]) -> Any:
    """The results of the call, each device binding its own shard where operands are sharded.

    A call without scores is not split.
    """
    if call.spec.is_empty:
        return call.results_by(bind, operands)
    surroundings = settings.current()
    # What JAX's compilation cache goes by. The call itself is nowhere in the program but in a
    # Python object, whose address jax_remove_custom_partitioning_ptr_from_cache_key leaves out.
    with set_xla_metadata(attn_dispatch=f"{call!r} {surroundings!r}"):
        return _partitioner(bind, call, surroundings)(*operands)


@lru_cache(maxsize=4096)
def _partitioner(
    bind: Bind, call: LeadingCall, surroundings: settings.Settings
) -> Callable[..., Any]:
    inputs, outputs = layouts(call)

    def shards_of(mesh: Mesh, args: Any) -> tuple[Mesh, Shards]:
        by_name = dict(zip(call.options.operands, args, strict=True))
        given = {x: (by_name[x].sharding, len(by_name[x].shape)) for x in ("query", of_keys(call))}
        mesh, specs = mesh_and_specs(mesh, given)
        return mesh, Shards.of(call, mesh.shape, specs["query"], specs[of_keys(call)])

    def shardings(axes: tuple[str, ...], mesh: Mesh, shards: Shards) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, shards.spec_of(x)) for x in axes)

    def partition(mesh: Mesh, args: Any, results: Any) -> Any:
        mesh, shards = shards_of(mesh, args)
        say_unsplit(call.spec, shards.unused)

        def shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # This runs when XLA compiles, in whatever thread, and maybe after a `with` block of
            # settings has ended. What is bound here takes them along.
            with settings.restored(surroundings), use_abstract_mesh(_NO_MESH):
                return shard_call(bind, call, shards, operands)

        to = shardings(outputs, mesh, shards)
        return mesh, shard, to, shardings(inputs, mesh, shards)

    def infer(mesh: Mesh, args: Any, results: Any) -> tuple[NamedSharding, ...]:
        return shardings(outputs, *shards_of(mesh, args))

    def unsplit(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return call.results_by(bind, operands)

    def rule(mesh: Mesh, *_: Any) -> tuple[str, dict[str, object]]:
        return _rule(call.spec, mesh, inputs, outputs)

    whole = custom_partitioning(unsplit)
    whole.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=rule,
    )
    return whole


def _rule(
    spec: AttentionSpec, mesh: Mesh, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[str, dict[str, object]]:
    """The sharding rule, such as "b0 b1 t (k g) h, b0 b1 s k h, b0 b1 s k v -> b0 b1 t (k g) v".

    Query heads are n, apart from k, where a mesh axis might split kv heads and groups at once: kv
    heads that lie whole would have gradients in parts, which are then gathered.
    """
    kv_heads, groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    sizes = {}
    if groups == 1:
        heads = "k"
    elif kv_heads > 1 and _splits_whole(kv_heads, list(mesh.shape.values())):
        heads, sizes = "(k g)", {"g": groups}
    else:
        heads = "n"
    text = " -> ".join(
        ", ".join(re.sub(r"\bn\b", heads, x) for x in side) for side in (inputs, outputs)
    )
    # The partitioner wants them in order of appearance.
    factors = dict.fromkeys(re.findall(r"\w+", text))
    replicated = tuple(x for x in factors if not re.fullmatch(r"b\d+|k|g|n", x))
    return text, {"need_replication_factors": replicated, **sizes}


def _splits_whole(size: int, axes: list[int]) -> bool:
    """Whether axes of these sizes, in any order, split this up to the end with no axis cut."""
    return size == 1 or all(
        size % axis == 0 and _splits_whole(size // axis, axes[:i] + axes[i + 1 :])
        for i, axis in enumerate(axes)
        if axis > 1
    )
