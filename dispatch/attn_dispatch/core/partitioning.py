"""Attention on arrays sharded under `jit` along Auto axes, with no gather that can be avoided.

A Shardy rule tells the partitioner which axes belong together. Each device then computes an
ordinary, smaller call, which gets its spec when it is lowered. If devices share an operand (a bias
of batch 1, kv heads), its gradient is the sum of what they compute.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from attn_dispatch import settings
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.jax_compat import custom_partitioning, set_xla_metadata
from attn_dispatch.core.mesh_axes import mesh_and_specs, spec_on
from attn_dispatch.core.partly_manual import begin_in, group_of, numbers, without_sums
from attn_dispatch.core.sharding_warnings import SplitCall, warn_of_costs
from attn_dispatch.core.shards import (
    WITH_ROWS,
    Shards,
    further_layouts,
    key_operand,
    layouts,
    numbered_axes,
    shard_call,
)
from attn_dispatch.core.splitting import split

_NO_MESH = AbstractMesh((), ())

_Args = Sequence[jax.ShapeDtypeStruct]
_Shardings = tuple[NamedSharding, ...]
_Partition = tuple[Mesh, Callable[..., tuple[jax.Array, ...]], _Shardings, _Shardings]
"""The mesh, what each device computes, and the shardings of results and operands."""


def partitioned(
    bind: Bind, call: LeadingCall, operands: tuple[jax.Array, ...], *, is_in_group: bool = False
) -> tuple[jax.Array, ...]:
    """The results of the call; if operands are sharded, each device computes its shard.

    Arrays that follow the operands (mask_arrays.py) are split along leading dims with them.

    A call without scores is not split. `is_in_group`: the call is inside a shard_map over other
    axes (partly_manual.py).
    """
    if call.spec.is_empty:
        return call.results_by(bind, operands)
    surroundings = settings.current()
    # Metadata make the call a part of the key of JAX's compilation cache. Otherwise only a Python
    # object holds it, whose address jax_remove_custom_partitioning_ptr_from_cache_key ignores.
    with set_xla_metadata(attn_dispatch=_name_of(call, surroundings)):
        more = numbers(call) if is_in_group else []
        further = tuple(x.shape for x in operands[len(call.operands) :])
        return _partitioner(bind, call, further, surroundings, is_in_group)(*operands, *more)


def _name_of(call: LeadingCall, surroundings: settings.Settings) -> str:
    """A name that only equal calls under equal settings share, short because XLA's messages repeat
    it: "forward 1f0c5e9a8b7d6c3e"."""
    direction = "backward" if call.options.wanted.gradients else "forward"
    facts = f"{call!r} {surroundings!r}".encode()
    return f"{direction} {hashlib.sha256(facts).hexdigest()[:16]}"


@lru_cache(maxsize=4096)
def _partitioner(
    bind: Bind,
    call: LeadingCall,
    further: tuple[tuple[int, ...], ...],
    surroundings: settings.Settings,
    is_in_group: bool,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of the operands, of arrays of the shapes `further`, and of a group's numbers."""
    inputs, outputs = layouts(call)
    own = len(inputs)
    inputs += further_layouts(call, further)
    count = len(inputs)
    if is_in_group:
        inputs += tuple(numbered_axes(call))

    def shards_of(mesh: Mesh, args: _Args) -> tuple[Mesh, Shards, tuple[str, ...]]:
        mesh = group_of(mesh) if is_in_group else mesh
        by_name = dict(zip(call.options.operands, args[:own], strict=True))
        given = {
            x: (by_name[x].sharding, len(by_name[x].shape)) for x in ("query", key_operand(call))
        }
        mesh, specs = mesh_and_specs(mesh, given, in_parts=is_in_group)
        query, key = specs["query"], specs[key_operand(call)]
        with settings.restored(surroundings):
            shards = split(call, mesh.shape, query, key, wanted="heads" if is_in_group else None)
        left_out: tuple[str, ...] = ()
        if is_in_group:
            shards, left_out = without_sums(shards, call)
        return mesh, shards, left_out

    def shardings(axes: tuple[str, ...], mesh: Mesh, shards: Shards) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, shards.spec_of(x)) for x in axes)

    def partition(mesh: Mesh, args: _Args, results: object) -> _Partition:
        mesh, shards, left_out = shards_of(mesh, args)
        by_name = zip(call.options.operands, args[:own], strict=True)
        before = {
            name: spec_on(mesh, x.sharding, len(x.shape))
            for name, x in by_name
            if name in WITH_ROWS
        }
        with settings.restored(surroundings):
            warn_of_costs(SplitCall(call, shards, before, left_out))

        def shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # This runs when XLA compiles, in any thread, and maybe after a `with` block of settings
            # has ended. So the settings of the call are restored here.
            with settings.restored(surroundings), use_abstract_mesh(_NO_MESH):
                begin = begin_in(call, operands[count:]) if is_in_group else None
                return shard_call(bind, call, shards, operands[:count], begin)

        to = shardings(outputs, mesh, shards)
        return mesh, shard, to, shardings(inputs, mesh, shards)

    def infer(mesh: Mesh, args: _Args, results: object) -> tuple[NamedSharding, ...]:
        mesh, shards, _ = shards_of(mesh, args)
        return shardings(outputs, mesh, shards)

    def unsplit(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return call.results_by(bind, operands[:count])

    def rule(mesh: Mesh, *_: object) -> tuple[str, dict[str, object]]:
        return sharding_rule(call.spec, mesh, inputs, outputs)

    whole = custom_partitioning(unsplit)
    whole.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=rule,
    )
    return cast("Callable[..., tuple[jax.Array, ...]]", whole)


def sharding_rule(
    spec: AttentionSpec,
    mesh: Mesh | AbstractMesh,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> tuple[str, dict[str, object]]:
    """The sharding rule, such as "b0 b1 t (k g) h, b0 b1 s k h, b0 b1 s k v -> b0 b1 t (k g) v".

    If one mesh axis might split both kv heads and groups, query heads are a separate factor n.
    Otherwise the gradients of unsplit kv heads would be split, and then gathered.
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
    # The partitioner requires factors in order of appearance.
    factors = dict.fromkeys(re.findall(r"\w+", text))
    replicated = tuple(x for x in factors if not re.fullmatch(r"b\d+|k|g|n", x))
    return text, {"need_replication_factors": replicated, **sizes}


def _splits_whole(size: int, axes: list[int]) -> bool:
    """Whether axes of these sizes, in any order, split `size` into ones without cutting an axis."""
    return size == 1 or all(
        size % axis == 0 and _splits_whole(size // axis, axes[:i] + axes[i + 1 :])
        for i, axis in enumerate(axes)
        if axis > 1
    )
