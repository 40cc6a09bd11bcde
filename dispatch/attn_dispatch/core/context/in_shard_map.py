"""A call in a shard_map with `context_axis`: each device has some rows and keys of the sequences.

The call is split as under `jit` (core/shards.py). What the partitioner does there is done here:
arrays go from devices that have some rows to devices that have some heads or batch rows (Jacobs et
al. 2023, arXiv:2309.14509), and results go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.context import Context
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.operands import Operand, listed
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core import jax_compat
from attn_dispatch.core.context.strategies import Spread, all_reasons
from attn_dispatch.core.context.zigzag import in_sequence, in_zigzag
from attn_dispatch.core.shards import Shards, is_repeated, layout, shard_call
from attn_dispatch.core.splitting import split

_SCORES = ("bias", "mask")
"""Operands with columns for all keys of the sequence."""
_WHOLE = ("keep",)
"""Results whose rows are not exchanged: no strategy takes calls that return them."""

Move = tuple[str, tuple[str, ...]]
"""A letter of shards.py, "" for none, and the mesh axes along which devices exchange rows for parts
of the dim with that letter, or gather rows."""


def results(
    bind: Bind, options: AttentionOptions, operands: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The device's results of a call with `Meaning.context`.

    Args:
      bind: returns, for options, the function that computes a call on one device.
      options: those of the call.
      operands: those of the device, in the order of `options.operands`.

    Raises:
      NotImplementedError: no strategy can run the call; the message has every reason.
    """
    exchange = Exchange.of(options, operands, jax.sharding.get_abstract_mesh())
    return exchange.results(bind, jax_compat.vary_alike(operands))


@dataclass(frozen=True)
class Exchange:
    """The way of arrays between devices that have rows and devices that have parts of a call."""

    context: Context
    call: LeadingCall
    """The whole call."""
    shards: Shards
    """How it is split."""

    @staticmethod
    def of(
        options: AttentionOptions,
        operands: Sequence[jax.Array | ShapedArray],
        mesh: Mesh | AbstractMesh,
    ) -> Exchange:
        """The exchange for a call with these operands of one device, in a shard_map of this mesh.

        Raises:
          NotImplementedError: as `results`.
        """
        context = options.meaning.context
        assert context is not None
        call = whole_call(options, operands)
        sizes = {axis: mesh.shape[axis] for axis in context.axes}
        spread = P(*(None for _ in call.dims), context.axes)
        shards = split(call, sizes, spread, spread, context=context)
        if shards.unused:
            raise NotImplementedError(_refusal(call, context))
        stays = not (shards.heads or any(shards.leading)) and shards.strategy != "gather"
        stays = stays and len(call.dims) == 1  # folding batch dims would reshape sharded ones
        if not stays and (explicit := _explicit_axes(mesh)):
            raise NotImplementedError(
                f"in a shard_map over {context.axes} whose other axes {explicit} are Explicit, "
                "only rings and halos with one batch dim are possible: make the shard_map manual "
                "over all axes, or the others Auto"
            )
        return Exchange(context, call, shards)

    def results(self, bind: Bind, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The device's results, from its operands."""
        options, parts = self.call.options, dict[str, jax.Array]()
        for name, x in zip(options.operands, operands, strict=True):
            is_there = is_repeated(name, options)
            parts[name] = parts["query_segment_ids"] if is_there else self.to_parts(name, x)
        own = tuple(parts.values())
        found = shard_call(bind, self.call, self.shards, own, summed=self.summed)
        names = self.call.spec.result_names
        return tuple(self.to_rows(name, x) for name, x in zip(names, found, strict=True))

    @property
    def specs(self) -> dict[str, P]:
        """How the operands of the whole call are spread over devices before it, by name."""
        spread = dict[str, P]()
        for name in self.call.options.operands:
            letters = layout(self.call, name).split()
            rows = _rows(name, letters)
            before = () if rows is None else (*(None for _ in letters[:rows]), self.context.axes)
            spread[name] = P(*before)
        return spread

    def to_parts(self, name: str, x: jax.Array) -> jax.Array:
        """An operand's part for this device's part of the call, from its rows of the operand."""
        letters = layout(self.call, name).split()
        rows = _rows(name, letters)
        for letter, axes in self._moves(letters):
            dim = letters.index(letter) if letter else None
            if rows is None:
                x = x if dim is None else _own(x, axes, dim)
                continue
            if dim is None:
                x = cast("jax.Array", lax.all_gather(x, axes, axis=rows, tiled=True))
            else:
                x = cast("jax.Array", lax.all_to_all(x, axes, dim, rows, tiled=True))
            if self.context.order == "zigzag":
                x = in_sequence(x, rows, self.shards.ways(axes))
        return x

    def to_rows(self, name: str, x: jax.Array) -> jax.Array:
        """This device's rows of a result, from its part; of an operand without rows, its share of
        the gradient."""
        operands = self.call.options.operands
        letters = (
            layout(self.call, name).split()
            if name in operands
            else [*(f"b{i}" for i in range(len(self.call.dims))), *listed(name).axes[1:]]
        )
        rows = _rows(name, letters)
        for letter, axes in reversed(list(self._moves(letters))):
            dim = letters.index(letter) if letter else None
            if rows is None:
                x = x if dim is None else _among_zeros(x, axes, dim, self.shards.ways(axes))
                continue
            if self.context.order == "zigzag":
                x = in_zigzag(x, rows, self.shards.ways(axes))
            if dim is None:
                x = _own(x, axes, rows)
            else:
                x = cast("jax.Array", lax.all_to_all(x, axes, rows, dim, tiled=True))
        return x

    def summed(self, name: str) -> tuple[str, ...]:
        """The axes over which a gradient is summed here: JAX sums those of operands without rows,
        which all devices share."""
        has_rows = _rows(name, layout(self.call, name).split()) is not None
        return self.shards.summed(self.call, name) if has_rows else ()

    def _moves(self, letters: Sequence[str]) -> Iterator[Move]:
        """The exchanges of an array with these axes; devices that hold neighbouring rows first."""
        shards = self.shards
        if "k" in letters:
            heads = [("", shards.groups), ("k", shards.kv_heads)]
        else:
            heads = [("n" if "n" in letters else "", shards.heads)]
        leading = [
            (f"b{i}" if f"b{i}" in letters else "", axes) for i, axes in enumerate(shards.leading)
        ]
        found = [(letter, axes) for letter, axes in heads + leading if axes]
        yield from sorted(found, key=lambda x: -self.context.axes.index(x[1][-1]))


def _explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(x for x, kind in kinds if kind == AxisType.Explicit and mesh.shape[x] > 1)


def whole_call(
    options: AttentionOptions, operands: Sequence[jax.Array | ShapedArray]
) -> LeadingCall:
    """The call of all devices, from that of one with these operands."""
    context = options.meaning.context
    own = LeadingCall.of(operands, options).operands
    if context is None:
        return LeadingCall(options, own)
    *leading, rows, _, _ = own[0].shape
    return LeadingCall(
        without_context(options),
        tuple(_whole(x, context.devices, rows, len(leading)) for x in own),
    )


def without_context(options: AttentionOptions) -> AttentionOptions:
    """The options of the whole call."""
    partner, wanted = options.wanted.partner, options.wanted
    if partner is not None:
        wanted = replace(wanted, partner=without_context(partner))
    return replace(options, meaning=replace(options.meaning, context=None), wanted=wanted)


def _whole(own: Operand, devices: int, rows: int, leading: int) -> Operand:
    """The operand of the whole call, from that of a device with so many rows."""
    letters = [*("b" for _ in range(leading)), *listed(own.name).axes[1:]]
    dim = _rows(own.name, letters)
    # One row of a bias or mask is shared by all rows, unless the device has only one.
    if dim is None or (own.name in _SCORES and own.shape[dim] == 1 < rows):
        return own
    shape = list(own.shape)
    shape[dim] *= devices
    return replace(own, shape=tuple(shape))


def _rows(name: str, letters: Sequence[str]) -> int | None:
    """The dim of the rows or keys that are spread; None if the array has none."""
    letter = "t" if "t" in letters or name in _SCORES else "s"
    return letters.index(letter) if letter in letters and name not in _WHOLE else None


def _own(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """This device's part of a dim."""
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)


def _among_zeros(x: jax.Array, axes: tuple[str, ...], dim: int, ways: int) -> jax.Array:
    """This device's part of a dim, with zeros in place of the others."""
    shape = list(x.shape)
    shape[dim] *= ways
    first = lax.axis_index(axes) * x.shape[dim]
    whole, part = jax_compat.vary_alike((jnp.zeros(shape, x.dtype), x))
    return lax.dynamic_update_slice_in_dim(whole, part, first, axis=dim)


def _refusal(call: LeadingCall, context: Context) -> str:
    axes = ", ".join(map(repr, context.axes))
    text = f"no strategy can run this call, whose sequence is spread along {axes}"
    spread = Spread.of(call.spec, context.devices, context.order)
    if spread is None:
        return f"{text}: calls with pages, or without scores, are not spread"
    named = dict[str, list[str]]()
    for name, found in all_reasons(spread).items():
        for reason in found:
            named.setdefault(reason.with_remedy, []).append(name)
    why = (f"{', '.join(names)}: {reason}" for reason, names in named.items())
    return f"{text}: {'; '.join(why)}"
