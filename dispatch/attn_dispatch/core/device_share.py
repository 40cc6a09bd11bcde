"""What one device computes of a sharded call, and what it receives for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from attn_dispatch.call.context import Strategy
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.collectives import received
from attn_dispatch.core.context.cost import Cost
from attn_dispatch.core.shards import (
    Shardings,
    Shards,
    entry,
    is_repeated,
    layout,
    layouts,
    shard_call,
)
from attn_dispatch.text import in_units


@dataclass(frozen=True)
class DeviceShare:
    """Which part of a program's call one device computes; `str()` of it is a sentence."""

    text: str
    split: tuple[tuple[str, int], ...] = ()
    """The mesh axes that split the call, each with its number of devices."""
    received_bytes: int | None = None
    """The bytes that a device receives from others in a forward pass, the mean over all devices; it
    sends as many. None if that is not known, or in a program without a forward pass."""
    received_bytes_backward: int | None = None
    """The same of a backward pass."""
    strategy: Strategy | None = None
    """How devices exchange keys, if rows and keys stay where they are."""
    strategies: tuple[Cost, ...] = ()
    """If query is sharded along its length: what each strategy would cost, as modelled."""
    refusal: str = ""
    """Why no strategy can run a call with `context_axis`: NotImplementedError says the same."""

    def __str__(self) -> str:
        passes = {"forward": self.received_bytes, "backward": self.received_bytes_backward}
        known = {x: y for x, y in passes.items() if y is not None}
        if not any(known.values()):
            return self.text
        each = " and ".join(f"{in_units(y)} {x}" for x, y in known.items())
        return f"{self.text}; receives {each} from other devices, and sends as many"

    def received(self, spec: AttentionSpec, number: int) -> DeviceShare:
        """The share with the bytes that a device receives in this call."""
        if spec.is_backward:
            return replace(self, received_bytes_backward=number)
        return replace(self, received_bytes=number)

    def with_backward(self, backward: DeviceShare | None) -> DeviceShare:
        """The share of a forward call and the backward call that belongs to it."""
        if backward is None:
            return replace(self, received_bytes_backward=None)
        otherwise = "" if backward.text == self.text else f"; backward: {backward.text}"
        number = backward.received_bytes_backward
        return replace(self, text=self.text + otherwise, received_bytes_backward=number)


def received_bytes(shards: Shards, call: LeadingCall, specs: Mapping[str, P]) -> int:
    """The bytes of operands that each device gets from others before it computes its part.

    Args:
      shards: how the call is split.
      call: the whole call.
      specs: how operands are sharded before, by name; others are not counted.
    """
    return sum(
        _received(shards, x.shape, x.dtype, specs[x.name], shards.spec_of(layout(call, x.name)))
        for x in call.operands
        if x.name in specs and not is_repeated(x.name, call.options)
    )


def exchanged_bytes(shards: Shards, call: LeadingCall, outside: Shardings) -> int:
    """The bytes that each device gets from others before and after it computes its part."""
    operands = received_bytes(shards, call, outside.operands)
    parts = map(shards.spec_of, layouts(call)[1])
    return operands + sum(
        _received(shards, x.shape, x.dtype, part, after)
        for x, part, after in zip(call.results, parts, outside.results, strict=True)
        if after is not None
    )


def _received(shards: Shards, shape: Sequence[int], dtype: DTypeLike, before: P, after: P) -> int:
    """The bytes of an array that each device lacks, if it shall be sharded otherwise."""
    own = math.prod(shape) * jnp.dtype(dtype).itemsize
    missing = 1
    for i in range(len(shape)):
        own //= shards.ways(entry(after, i))
        missing *= shards.ways(tuple(x for x in entry(before, i) if x not in entry(after, i)))
    # Along axes that sharded the array before and do not split this dim after, a device holds one
    # of `missing` shares of what it needs, and receives the others.
    return own - own // missing


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


def device_call(shards: Shards, call: LeadingCall) -> tuple[AttentionSpec, int]:
    """The call that each device computes, or the first piece of it, and the bytes that each device
    receives meanwhile.

    Nothing is computed, and no device is needed.

    Args:
      shards: how the call is split.
      call: the whole call.
    """

    def part(name: str, dtype: str) -> jax.ShapeDtypeStruct:
        shape, split = call.shape(name), shards.spec_of(layout(call, name))
        ways = (shards.ways(entry(split, i)) for i in range(len(shape)))
        own = tuple(size // n for size, n in zip(shape, ways, strict=True))
        return jax.ShapeDtypeStruct(own, jnp.dtype(dtype))

    parts = [part(x.name, x.dtype) for x in call.operands]
    return traced_call(lambda bind, own: shard_call(bind, call, shards, own), shards, parts)


def traced_call(
    compute: Callable[[Bind, Sequence[jax.Array]], object],
    shards: Shards,
    operands: Sequence[jax.ShapeDtypeStruct],
) -> tuple[AttentionSpec, int]:
    """The same of a function of these operands of a device, which computes a call by `bind`."""
    found: list[AttentionSpec] = []

    def bind(options: AttentionOptions) -> Callable[..., list[jax.Array]]:
        def note(*own: jax.Array) -> list[jax.Array]:
            found.append(AttentionSpec.of(own, options))
            return [jnp.zeros(x.shape, x.dtype) for x in found[-1].results]

        return note

    def part(*own: jax.Array) -> object:
        return compute(bind, own)

    jaxpr = jax.make_jaxpr(part, axis_env=list(shards.sizes))(*operands).jaxpr
    return found[0], round(received(jaxpr, dict(shards.sizes)))
