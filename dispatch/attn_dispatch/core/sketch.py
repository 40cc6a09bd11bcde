"""How Auto mesh axes would split the calls of a program, without compiling it.

A sketch of the program is lowered, in which every call is left open: an operation with the sharding
rule that the partitioner gets for it (partitioning.py). Then the passes run by which XLA decides
how arrays are sharded, and the operands of the open calls show what each device would get.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast  # noqa: TID251  # MLIR's operations and attributes

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from attn_dispatch import settings
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core import jax_compat
from attn_dispatch.core.inlined_module import inline_calls
from attn_dispatch.core.jax_compat import Context, MlirValues, ir, passmanager, sdy, stablehlo
from attn_dispatch.core.partly_manual import group_shards
from attn_dispatch.core.shards import Shardings, Shards, key_operand, layouts
from attn_dispatch.core.splitting import split

_OPEN_CALL = "attn_dispatch_open_call"
_PASSES = "builtin.module(sdy-propagation-pipeline)"

Rule = tuple[str, dict[str, object]]
"""A sharding rule, and its further arguments."""

_Call = tuple[LeadingCall, AbstractMesh | None]
"""A call and, in a shard_map over some axes, the others."""

current: ContextVar[Sketch | None] = ContextVar("sketch", default=None)
"""The sketch that is lowered, if one is."""


class Sketch:
    """The calls of a program, and after `of_program` how each is split."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._found: dict[_Call, dict[Shards, Shardings]] = {}

    def find(
        self, call: LeadingCall, others: AbstractMesh | None = None
    ) -> dict[Shards, Shardings]:
        """Each way in which this call is split, and how its arrays are sharded outside of it.

        The same call may stand at several places of the program. Empty if the sketch does not have
        it.

        Args:
          call: the call.
          others: in a shard_map over some axes: the others.
        """
        return self._found.get((call, others), {})

    def open_call(
        self,
        context: Context,
        operands: MlirValues,
        options: AttentionOptions,
        rule: Callable[..., Rule] | None,
        others: AbstractMesh | None,
    ) -> MlirValues:
        """Lower a call as an operation without a meaning.

        Args:
          context: the context of the lowering rule.
          operands: the operands of the call.
          options: the options of the call.
          rule: returns the sharding rule that the call gets; None where the partitioner does not
            split it.
          others: in a shard_map over some axes: the others, which may split the call.
        """
        count = len(options.operands)  # what follows the operands is split as they are
        operands, types = operands[:count], jax_compat.types_of(context)[:count]
        call = LeadingCall.of(types, options)
        self._calls.append((call, others))
        results = jax_compat.result_types(context)
        opened = stablehlo.CustomCallOp(
            results,
            list(operands),
            ir.StringAttr.get(_OPEN_CALL),
            has_side_effect=True,  # so that a call whose results nothing uses stays
            backend_config=ir.StringAttr.get(str(len(self._calls) - 1)),
        )
        mesh = others or jax_compat.mesh_of_program(context)
        if mesh is not None and rule is not None:
            text, arguments = rule(call.spec, mesh, *layouts(call))
            opened.attributes["sdy.sharding_rule"] = jax_compat.sharding_rule(
                text, arguments, [x.type for x in operands], results
            )
        return cast("MlirValues", opened.results)

    def read(self, module: Any) -> None:
        """Find how the calls are split in a module that the passes have run on."""
        sizes: dict[str, int] = {}
        for operation in _operations(module.operation):
            if operation.name == "sdy.mesh":
                axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes)
                sizes |= {axis.name: axis.size for axis in axes}
        for operation in _operations(module.operation):
            if operation.name != "stablehlo.custom_call":
                continue
            if operation.attributes["call_target_name"].value != _OPEN_CALL:
                continue
            if _attribute(operation.attributes, "sdy.sharding_rule") is None:
                continue
            call, others = self._calls[int(operation.attributes["backend_config"].value)]
            specs = dict(zip(call.options.operands, map(_spec, operation.operands), strict=True))
            known = {name: spec for name, spec in specs.items() if spec is not None}
            if len(known) != len(specs):
                continue
            outside = Shardings(known, tuple(map(_spec, operation.results)))
            if others is None:
                with settings.within(call.options.settings):
                    shards = split(call, sizes, known["query"], known[key_operand(call)])
            else:
                shards, outside = group_shards(others, call, outside)
            self._found.setdefault((call, others), {}).setdefault(shards, outside)


def of_program(program: jax.stages.Traced, platform: str) -> Sketch:
    """How Auto axes split the calls of a program that is traced.

    The sketch has no call if the program has an operation that cannot be lowered here.

    Args:
      program: a program for several devices, which need not exist.
      platform: the platform of the devices.
    """
    sketch = Sketch()
    try:
        with _lowering(sketch), settings.restored(replace(settings.current(), is_sketch=True)):
            module: Any = program.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
        with module.context, ir.Location.unknown():
            inline_calls(module)
            passmanager.PassManager.parse(_PASSES).run(module.operation)
            sketch.read(module)
    except Exception:  # an operation of the user's that cannot be lowered here raises anything
        return Sketch()
    return sketch


@contextmanager
def _lowering(sketch: Sketch) -> Generator[None]:
    token = current.set(sketch)
    try:
        yield
    finally:
        current.reset(token)


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _spec(value: Any) -> P | None:
    """How an array is sharded; None along a part of an axis, which a spec cannot express.

    Of an argument of a shard_map's body, without the axes of the shard_map.
    """
    sharding, manual = _sharding(value), _manual_axes(value)
    if sharding is None:
        return P()
    dims = map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(sharding).dimension_shardings)
    axes = [[sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims]
    if any(axis.sub_axis_info is not None for dim in axes for axis in dim):
        return None
    return P(*(tuple(axis.name for axis in dim if axis.name not in manual) for dim in axes))


def _manual_axes(value: Any) -> list[str]:
    """The axes of the shard_map whose argument, inside it, a value is."""
    owner = value.owner.owner if isinstance(value.owner, ir.Block) else None
    attribute = None if owner is None else _attribute(owner.attributes, "manual_axes")
    axes: Any = [] if attribute is None else sdy.ManualAxesAttr(attribute)
    return [str(axes[i]) for i in range(len(axes))]


def _sharding(value: Any) -> Any:
    if isinstance(value.owner, ir.Block):
        owner, number = value.owner.owner, value.arg_number
        arguments = _attribute(owner.attributes, "arg_attrs")
        if arguments is not None:  # of a function
            return _attribute(arguments[number], "sdy.sharding")
        given = _attribute(owner.attributes, "in_shardings")
        return _of_result(owner, number) if given is None else _nth(given, number)
    return _of_result(value.owner, value.result_number)


def _of_result(operation: Any, number: int) -> Any:
    """The sharding of an operation's result, or of the argument of a loop's body."""
    attributes = operation.attributes
    for name in ("sharding", "out_sharding"):  # of a reshard or a collective
        if (found := _attribute(attributes, name)) is not None:
            return found
    for name in ("sdy.sharding", "out_shardings"):  # the second is of a shard_map
        if (found := _attribute(attributes, name)) is not None:
            return _nth(found, number)
    return None


def _nth(shardings: Any, number: int) -> Any:
    return sdy.TensorShardingPerValueAttr(shardings).shardings[number]


def _attribute(attributes: Any, name: str) -> Any:
    return attributes[name] if name in attributes else None
