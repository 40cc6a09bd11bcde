"""A call divided into parts of batch rows or of heads, which a loop computes one after the other.

A kernel's scratch memory, launch grid and strides grow with the batch and the heads of its call, so
each part needs less. If parts share an operand, a bias for example, its gradients are summed in
float32, and each part's gradient is added at once and not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from attn_dispatch.call.divisors import largest_divisor
from attn_dispatch.call.operands import listed
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    Axis,
    Calls,
    KernelCompute,
    NamedArrays,
    Parts,
    Rewrite,
    changed,
)

Index = jax.Array | int

_STARTS = ("mods_start", "dropout_start")
"""Operands [·, 2] with the numbers of the first batch row and the first head."""


@cache
def in_parts_of(axis: Axis, size: int) -> Rewrite:
    """The rewrite into parts of `size` batch rows or query heads.

    Along the batch, the last part may have fewer rows.
    """
    parts, unit = _InParts(axis, size), "batch row" if axis == "batch" else "head"
    return Rewrite(
        f"in parts of {size} {unit}{'s' * (size > 1)}, one after the other",
        parts.part,
        parts.compute,
        adds=("dropout_start",),
        when=parts.divides,
        beside=parts.rest,
        own_bytes=parts.own_bytes,
        parts=parts,
        # Each part draws its dropout mask from another start.
        moves_dropout=True,
    )


@dataclass(frozen=True)
class _InParts(Parts):
    """The functions of the rewrite into parts of one size along one axis."""

    def divides(self, spec: AttentionSpec) -> bool:
        whole = length_of(spec, self.axis)
        if not isinstance(whole, int) or not 0 < self.size < whole:
            return False
        if self.axis == "heads":
            group = spec.num_heads // spec.num_kv_heads
            return not (whole % self.size or (self.size % group and group % self.size))
        return _keeps_copies_whole(spec, self.size)

    def part(self, spec: AttentionSpec) -> AttentionSpec:
        return self._part(spec, self.size)

    def rest(self, spec: AttentionSpec) -> AttentionSpec | None:
        rest = length_of(spec, self.axis) % self.size
        return self._part(spec, rest) if rest else None

    def own_bytes(self, spec: AttentionSpec) -> int:
        """Bytes that the loop needs in addition to a part's scratch memory: for the part's operands
        and results, and for the sums of gradients."""
        inner = self._part(spec, self.size)
        held: list[tuple[tuple[int, ...], DTypeLike]]
        held = [(x.shape, x.dtype) for x in inner.operands if self._division(spec, x.name)]
        held += [(x.shape, x.dtype) for x in inner.results]
        for name, x in zip(spec.result_names, spec.results, strict=True):
            if self._is_summed(spec, name) and x.dtype != _wide(x.dtype):
                held.append((x.shape, _wide(x.dtype)))
        return sum(prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in held)

    def compute(
        self, spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
    ) -> NamedArrays:
        rest = self.rest(spec)
        results = dict(zip(spec.result_names, spec.results, strict=True))
        start = {
            name: jnp.zeros(x.shape, _wide(x.dtype))
            if self._is_summed(spec, name)
            else cast("jax.Array", lax.empty(x.shape, x.dtype))
            for name, x in results.items()
        }

        def after(
            state: NamedArrays, first: Index, part: AttentionSpec, compute: KernelCompute
        ) -> NamedArrays:
            found = compute(self._operands(spec, operands, first, part))
            return {
                name: self._with(spec, name, x, found[name].astype(x.dtype), first, part)
                for name, x in state.items()
            }

        def next_part(state: NamedArrays, number: jax.Array) -> tuple[NamedArrays, None]:
            return after(state, number * self.size, inner, calls.kernel), None

        whole = length_of(spec, self.axis) // self.size
        state, _ = lax.scan(next_part, start, jnp.arange(whole, dtype=jnp.int32))
        if rest is not None:
            state = after(state, whole * self.size, rest, partial(calls.beside, rest))
        return {name: x.astype(results[name].dtype) for name, x in state.items()}

    def _part(self, spec: AttentionSpec, size: int) -> AttentionSpec:
        """The call of a part of `size` batch rows or heads."""
        arrays: dict[str, tuple[tuple[int, ...], str]] = {}
        for x in spec.operands:
            if division := self._division(spec, x.name):
                shape = list(x.shape)
                shape[division.axis] = division.length(size)
                arrays[x.name] = (tuple(shape), x.dtype)
        if spec.has("dropout_key") and not spec.has("dropout_start"):
            arrays["dropout_start"] = ((spec.shape("dropout_key")[0], 2), "int32")
        return changed(spec, arrays=arrays, same_lengths=spec.meaning.same_lengths)

    def _operands(
        self, spec: AttentionSpec, operands: NamedArrays, first: Index, part: AttentionSpec
    ) -> NamedArrays:
        """The operands of a part that begins with batch row or head `first`."""
        taken, size = dict(operands), length_of(part, self.axis)
        for name, x in operands.items():
            if division := self._division(spec, name):
                taken[name] = division.take(x, first, size)
        if part.has("dropout_start") and "dropout_start" not in taken:
            taken["dropout_start"] = jnp.zeros(part.shape("dropout_start"), jnp.int32)
        for name in (x for x in _STARTS if x in taken):
            column = 0 if self.axis == "batch" else 1
            taken[name] = taken[name].at[:, column].add(self._moved(spec, name, first))
        return taken

    def _moved(self, spec: AttentionSpec, name: str, first: Index) -> Index:
        """The number to add to the start in operand `name`, which names a first row and head.

        If entries of the operand belong to several batch rows each, the start is that of the first
        of them, and this is the distance from there to the part's first row.
        """
        if self.axis == "heads":
            return first
        division = self._division(spec, name) if spec.has(name) else None
        return first if division is None else first % division.rows

    def _with(
        self,
        spec: AttentionSpec,
        name: str,
        x: jax.Array,
        found: jax.Array,
        first: Index,
        part: AttentionSpec,
    ) -> jax.Array:
        """A result with a part's contribution `found` added or put in place."""
        division = self._division(spec, name)
        if division is None:
            return x + found
        if self._is_summed(spec, name):
            found = division.take(x, first, length_of(part, self.axis)) + found
        return lax.dynamic_update_slice_in_dim(x, found, division.start(first), division.axis)

    def _is_summed(self, spec: AttentionSpec, name: str) -> bool:
        """Whether several parts contribute to the same entry of a gradient."""
        division = self._division(spec, name)
        return spec.is_backward and (division is None or division.rows > self.size)

    def _division(self, spec: AttentionSpec, name: str) -> _Division | None:
        """How parts divide an operand or result; None if every part has all of it."""
        shape = spec.shape(name) if spec.has(name) else None
        if self.axis == "batch":
            entries = spec.batch if shape is None else shape[0]
            return None if entries == 1 else _Division(0, spec.batch // entries)
        for axis, letter in enumerate(listed(name).axes):
            if letter == "k":
                return _Division(axis, spec.num_heads // spec.num_kv_heads)
            if letter == "n" and (shape is None or shape[axis] > 1):
                return _Division(axis, 1)
        return None


@dataclass(frozen=True)
class _Division:
    """An axis of an array that is divided among the parts."""

    axis: int
    rows: int
    """The number of batch rows, or of query heads, that share an entry."""

    def start(self, first: Index) -> Index:
        return first // self.rows

    def length(self, size: int) -> int:
        return max(size // self.rows, 1)

    def take(self, x: jax.Array, first: Index, size: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, self.start(first), self.length(size), self.axis)


def length_of(spec: AttentionSpec, axis: Axis) -> int:
    """The number of batch rows or of query heads."""
    return spec.batch if axis == "batch" else spec.num_heads


def most_heads(spec: AttentionSpec, most: int) -> int:
    """The largest number of heads for a part, up to `most`: whole groups, or equal parts of one."""
    group = spec.num_heads // spec.num_kv_heads
    most = min(most, spec.num_heads - 1)
    if most < group:
        return largest_divisor(group, most)
    return group * largest_divisor(spec.num_kv_heads, most // group)


def _keeps_copies_whole(spec: AttentionSpec, size: int) -> bool:
    """Whether each part of `size` rows has whole entries, or lies within one entry, of every
    operand whose entries are shared by several rows but not by the whole batch."""
    if spec.has("dropout_key") and spec.shape("dropout_key")[0] > 1:
        return False
    numbers = {x.shape[0] for x in spec.operands} - {1, spec.batch}
    each = [spec.batch // number for number in numbers]
    is_whole = all(size % rows == 0 or rows % size == 0 for rows in each)
    return is_whole and not (numbers and spec.batch % size)


def _wide(dtype: DTypeLike) -> np.dtype:
    return np.promote_types(jnp.dtype(dtype), np.float32)
