"""What one device computes of a sharded call, and what it receives for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.context import Strategy
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context.cost import Cost
from attn_dispatch.core.shards import Shards, entry, layout, shard_call


@dataclass(frozen=True)
class DeviceShare:
    """Which part of a program's call one device computes; `str()` of it is a sentence."""

    text: str
    split: tuple[tuple[str, int], ...] = ()
    """The mesh axes that split the call, each with its number of devices."""
    received_bytes: int = 0
    """The bytes of operands that the device gets from others before it computes its part."""
    strategy: Strategy | None = None
    """How devices exchange keys, if rows and keys stay where they are."""
    strategies: tuple[Cost, ...] = ()
    """If query is sharded along its length: what each strategy would cost, as modelled."""
    refusal: str = ""
    """Why no strategy can run a call with `context_axis`: NotImplementedError says the same."""

    def __str__(self) -> str:
        return self.text


def received_bytes(shards: Shards, call: LeadingCall, specs: Mapping[str, P]) -> int:
    """The bytes of operands that each device gets from others before it computes its part.

    Args:
      shards: how the call is split.
      call: the whole call.
      specs: how operands are sharded before, by name; others are not counted.
    """
    total = 0
    for operand in call.operands:
        if operand.name not in specs:
            continue
        before, part = specs[operand.name], shards.spec_of(layout(call, operand.name))
        own = math.prod(operand.shape) * np.dtype(operand.dtype).itemsize
        missing = 1
        for i in range(len(operand.shape)):
            own //= shards.ways(entry(part, i))
            missing *= shards.ways(tuple(x for x in entry(before, i) if x not in entry(part, i)))
        # Along axes that sharded the operand before and do not split the call, a device holds one
        # of `missing` shares of its part, and receives the others.
        total += own - own // missing
    return total


def axes_lost(shards: Shards, call: LeadingCall, name: str, before: P) -> dict[str, str]:
    """The mesh axes that split an operand before, and split nothing of it in the parts that devices
    compute, each with the letter of its dim.

    Along these axes the operand is gathered; along one that splits another dim, only exchanged.
    """
    letters = layout(call, name).split()
    part = shards.spec_of(" ".join(letters))
    kept = {axis for i in range(len(letters)) for axis in entry(part, i)}
    sizes = dict(shards.sizes)
    return {
        axis: letter
        for i, letter in enumerate(letters)
        for axis in entry(before, i)
        if axis not in kept and sizes[axis] > 1
    }


def device_spec(shards: Shards, call: LeadingCall) -> AttentionSpec:
    """The spec of the call that each device computes, or of the first piece of it.

    Nothing is computed, and no device is needed.

    Args:
      shards: how the call is split.
      call: the whole call.
    """
    found: list[AttentionSpec] = []

    def bind(options: AttentionOptions) -> Callable[..., list[jax.Array]]:
        def note(*own: jax.Array) -> list[jax.Array]:
            found.append(AttentionSpec.of(own, options))
            return [jnp.zeros(x.shape, x.dtype) for x in found[-1].results]

        return note

    def part(name: str, dtype: str) -> jax.ShapeDtypeStruct:
        shape, split = call.shape(name), shards.spec_of(layout(call, name))
        ways = (shards.ways(entry(split, i)) for i in range(len(shape)))
        own = tuple(size // n for size, n in zip(shape, ways, strict=True))
        return jax.ShapeDtypeStruct(own, jnp.dtype(dtype))

    parts = (part(x.name, x.dtype) for x in call.operands)

    def shard(*own: jax.Array) -> tuple[jax.Array, ...]:
        return shard_call(bind, call, shards, own)

    jax.make_jaxpr(shard, axis_env=list(shards.sizes))(*parts)
    return found[0]
