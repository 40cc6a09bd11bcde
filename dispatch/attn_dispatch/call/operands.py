"""The arrays of a call: its operands and its results, with their shapes and dtypes.

Letters used for shapes here and everywhere: B batch, T query length, S key length, N heads,
K kv heads, G = N // K, H head dim of query and key, V head dim of value.

A call's operands are named in `AttentionOptions.operands` (options.py). In a spec every one starts
with one batch axis, which is folded from the leading dims (leading.py):

====================== ========================== ===================
operand                shape                      dtype
====================== ========================== ===================
query                  [B, T, N, H]               the call's dtype
key, value             [B, S, K, H], [B, S, K, V] the call's dtype
key_pages, value_pages [C, P, page, K, H or V]    the call's dtype
page_table             [B, M], B % C == 0         int32
bias                   [1|B, 1|N, 1|T, 1|S]       floating
mask                   [1|B, 1|N, 1|T, 1|S]       bool, True = attend
query_seq_lengths      [B]                        int32
key_value_seq_lengths  [B]                        int32
query_segment_ids      [B, T]                     int32
key_value_segment_ids  [B, S]                     int32
cu_seqlens_q           [B, M + 1]                 int32
cu_seqlens_kv          [B, M + 1]                 int32
window                 [1|B, 2]                   int32, (left, right)
causal_offset          [1|B]                      int32
alibi_slopes           [1|B, N]                   floating
sinks                  [1|B, N]                   floating
dropout_key            [D, words], B % D == 0     uint32 key data
dropout_start          [D, 2]                     int32
score_mod_0, …         [1|C, ...]                 any; what score_mod reads
mask_mod_0, …          [1|C, ...]                 any; what mask_mod reads
mods_start             [C, 2], B % C == 0         int32
out, out_grad          [B, T, N, V]               the call's dtype
lse, lse_grad          [B, N, T]                  `lse_dtype`
keep                   [B, N, T, S]               bool
====================== ========================== ===================

A paged call has key_pages, value_pages and page_table instead of key and value, and S is
M · page: key s of batch row b is key s % page of page page_table[b, s // page], of the pages of
pool b // (B / C); its value is in page page_table[b, s // page] + value_page. It has
key_value_seq_lengths, and no gradients; entries of the table past a length mean nothing.

Only the backward pass has the last three rows: `lse_grad` only if lse was returned, and `keep` only
instead of dropout_key and dropout_start, if XLA computes with another implementation's mask.
Row d of dropout_key draws the mask of the B / D consecutive batch rows from d·B/D on. If the call
is one device's part of a larger one, dropout_start has for each key the first of the key's batch
rows, and the first head, of this part. Likewise entry c of the arrays that mods read serves the
B / C consecutive batch rows from c·B/C on. Mods get b counted from mods_start[c, 0] on in these
rows, and n from mods_start[c, 1] on.

The forward pass returns these results, in this order, as far as the options name them:

======= ============ =========== =================================================================
result  shape        dtype
======= ============ =========== =================================================================
out     [B, T, N, V] the call's
lse     [B, N, T]    `lse_dtype` log of the softmax denominator, sink included
row_max [B, N, T]    `lse_dtype` largest score that the row may attend to, without the sink: after
                                 scale, soft cap, bias, ALiBi and mask; -inf if there is none
keep    [B, N, T, S] bool        True where dropout keeps a pair (everywhere without dropout);
                                 unspecified where the pair may not attend
======= ============ =========== =================================================================

out and lse are differentiable, row_max and keep are not. The backward pass returns the wanted
gradients.

TABLE says the same to code: the axes of each array, its dtype, and its roles. Code that treats
arrays by their axes asks the table. So a new operand is one entry, and what computes with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from numpy.typing import DTypeLike

Operands = Mapping[str, jax.Array]
"""The arrays of a call, by the names of its spec's operands."""


class ArrayType(Protocol):
    """An array, or its shape and dtype alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


@dataclass(frozen=True)
class Operand:
    """The shape and the name of the dtype of one array of the call."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """The array as the caller gave it: pages of one pool have no axis of pools."""
        is_one_pool = self.name in ("key_pages", "value_pages") and self.shape[0] == 1
        shape = self.shape[1:] if is_one_pool else self.shape
        return f"{self.name} {self.dtype}{list(shape)}"


Role = Literal["differentiable", "length", "sequence", "ids", "pages", "residual"]
"""What code asks of an operand beside its axes:

- differentiable: it has a gradient;
- length, sequence: it holds lengths; it says where sequences end, as lengths do;
- ids: the ids of places, and so which rows are invalid, depend on it;
- pages: a paged call has it in place of key and value;
- residual: only backward calls have it.
"""


@dataclass(frozen=True)
class Entry:
    """What is known of every array with a name, whatever the call."""

    name: str
    letters: str
    """Its axes in a spec, by their letters. "1n" may also have the size 1: then all share it."""
    dtype: str
    """"call" and "lse" are those of the call; "" is one that the caller chooses."""
    roles: tuple[Role, ...] = ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The letters of its axes."""
        return tuple(x.removeprefix("1") for x in self.letters.split())

    @cached_property
    def shared(self) -> frozenset[str]:
        """The letters of the axes that may also have the size 1."""
        return frozenset(x[1:] for x in self.letters.split() if x.startswith("1"))


TABLE = {
    x.name: x
    for x in (
        Entry("query", "b t n h", "call", ("differentiable",)),
        Entry("key", "b s k h", "call", ("differentiable",)),
        Entry("value", "b s k v", "call", ("differentiable",)),
        Entry("key_pages", "c p e k h", "call", ("pages",)),
        Entry("value_pages", "c p e k v", "call", ("pages",)),
        Entry("page_table", "b m", "int32", ("ids", "pages")),
        Entry("bias", "1b 1n 1t 1s", "", ("differentiable",)),
        Entry("mask", "1b 1n 1t 1s", "bool"),
        Entry("query_seq_lengths", "b", "int32", ("length", "sequence", "ids")),
        Entry("key_value_seq_lengths", "b", "int32", ("length", "sequence", "ids")),
        Entry("query_segment_ids", "b t", "int32", ("sequence", "ids")),
        Entry("key_value_segment_ids", "b s", "int32", ("sequence", "ids")),
        Entry("cu_seqlens_q", "b z", "int32", ("sequence", "ids")),
        Entry("cu_seqlens_kv", "b z", "int32", ("sequence", "ids")),
        Entry("window", "1b w", "int32", ("ids",)),
        Entry("causal_offset", "1b", "int32"),
        Entry("alibi_slopes", "1b n", "", ("differentiable",)),
        Entry("sinks", "1b n", "", ("differentiable",)),
        Entry("dropout_key", "d w", "uint32"),
        Entry("dropout_start", "d w", "int32"),
        Entry("score_mod", "1a", ""),
        Entry("mask_mod", "1a", ""),
        Entry("mods_start", "a w", "int32"),
        Entry("out", "b t n v", "call", ("residual",)),
        Entry("lse", "b n t", "lse", ("residual",)),
        Entry("out_grad", "b t n v", "call", ("residual",)),
        Entry("lse_grad", "b n t", "lse", ("residual",)),
        Entry("row_max", "b n t", "lse"),
        Entry("keep", "b n t s", "bool"),
    )
}
"""The operands and results of all calls. score_mod and mask_mod stand for all arrays that these
read, with the first of their axes.

Beside the letters above: C pools, P pages of a pool, E keys of a page, M columns of a page table,
Z ends of sequences, A entries that mods read, D dropout keys, W words or numbers.
"""

_MOD_OPERAND = re.compile(r"(score_mod|mask_mod)_\d+")


def mod_operands(mod: str, count: int) -> tuple[str, ...]:
    """The names of the arrays that a mod reads."""
    return tuple(f"{mod}_{i}" for i in range(count))


def is_mod_operand(name: str) -> bool:
    """Whether an operand is an array that a mod reads."""
    return _MOD_OPERAND.fullmatch(name) is not None


def listed(name: str) -> Entry:
    """The entry of an operand or result."""
    mod = _MOD_OPERAND.fullmatch(name)
    return TABLE[mod[1] if mod else name]


def with_role(role: Role) -> tuple[str, ...]:
    """The names of the operands with this role, in the order of the table."""
    return tuple(x.name for x in TABLE.values() if role in x.roles)


def with_axis(letter: str) -> tuple[str, ...]:
    """The names of the operands and results with this axis, in the order of the table."""
    return tuple(x.name for x in TABLE.values() if letter in x.axes)


def with_shared(letter: str) -> tuple[str, ...]:
    """The names of the operands that may be shared along this axis, in the order of the table."""
    return tuple(x.name for x in TABLE.values() if letter in x.shared)


def axis_of(name: str, letter: str) -> int | None:
    """The axis of an operand or result, counted from its end; None if it has none of this letter.

    So it is the same whatever leading dims the array has.
    """
    axes = listed(name).axes
    return axes.index(letter) - len(axes) if letter in axes else None


def axes_along(letter: str, *, apart_from: str) -> dict[str, int]:
    """The axis of this letter, counted from the end, of each operand and result with it and without
    the other one."""
    found = {name: axis_of(name, letter) for name in with_axis(letter)}
    others = with_axis(apart_from)
    return {name: x for name, x in found.items() if x is not None and name not in others}


def resized(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an operand or result after its axes get these sizes; an axis that it shares
    keeps the size 1."""
    known = listed(name)
    kept = zip(known.axes, shape, strict=False)  # a mod's array has further axes
    sized = tuple(size if _is_shared(known, x, size) else sizes.get(x, size) for x, size in kept)
    return sized + shape[len(sized) :]


def fitted(name: str, x: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """An operand or result cut, or padded with zeros, at the ends of its axes to these sizes."""
    shape = resized(name, x.shape, sizes)
    if any(new < old for new, old in zip(shape, x.shape, strict=True)):
        x = x[tuple(map(slice, shape))]
    if shape == x.shape:
        return x
    return jnp.pad(x, [(0, new - old) for new, old in zip(shape, x.shape, strict=True)])


def changed_along(
    letter: str, name: str, x: jax.Array, change: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """An operand or result changed by a function of [B, L, ...], where L is the axis of this
    letter; x itself if it has none."""
    if (axis := axis_of(name, letter)) is None:
        return x
    return jnp.moveaxis(change(jnp.moveaxis(x, axis, 1)), 1, axis)


def _is_shared(known: Entry, letter: str, size: int) -> bool:
    return letter in known.shared and size == 1


@dataclass(frozen=True)
class Section:
    """A range along some axes of a call, which is cut from its arrays and pasted back."""

    ranges: Mapping[str, tuple[int, int]]
    """First and end along the axes, by their letters."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of these axes in the section."""
        return {x: end - first for x, (first, end) in self.ranges.items()}

    def has(self, name: str) -> bool:
        """Whether an operand or result has one of the axes."""
        return not self.ranges.keys().isdisjoint(listed(name).axes)

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The section of an operand or result of the whole call; all of an axis that it shares."""
        known = listed(name)
        return tuple(
            slice(0, size) if _is_shared(known, x, size) else slice(*self.ranges.get(x, (0, size)))
            for x, size in zip(known.axes, shape, strict=False)
        )

    def cut(self, name: str, x: jax.Array) -> jax.Array:
        """The section of an operand or result; all of an array without any of the axes."""
        return x[self.slices(name, x.shape)] if self.has(name) else x

    def pasted(
        self, name: str, x: jax.Array, shape: tuple[int, ...], value: float | bool = 0
    ) -> jax.Array:
        """The section x put back into an array of this shape, with `value` around it."""
        if not self.has(name):
            return x
        ends = zip(self.slices(name, shape), shape, strict=True)
        return jnp.pad(x, [(y.start, size - y.stop) for y, size in ends], constant_values=value)
