"""The part of a sharded call that one device computes: which mesh axes split the call, and how.

Batch and heads are split, and where these do not divide or the user says so, rows and keys
(core/context). If a mesh axis has more devices than there are kv heads, each device holds all of
these, and uses those that its query heads need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.context import Context, SequenceOrder, Strategy
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.operands import is_mod_operand, listed, with_axis
from attn_dispatch.call.options import AttentionOptions, with_dropout_start
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context import compute

Begin = Callable[[str], jax.Array | int]
"""Returns the first index of one device's part along a batch dim (b0, b1, …) or query heads (n)."""

OF_KV_HEADS = with_axis("k")
"""The operands [..., K, dim]."""

WITH_ROWS = ("query", *OF_KV_HEADS)
"""The operands [..., rows, heads, dim]."""


def layout(call: LeadingCall, name: str) -> str:
    """The axes of an operand; an axis along which it is broadcast gets a unique letter."""
    spec = call.spec
    full = {"n": spec.num_heads, "t": spec.seq_len_q, "s": spec.seq_len_kv}
    full |= {f"b{i}": size for i, size in enumerate(call.dims)}
    position = call.options.operands.index(name)
    return " ".join(
        f"u{position}{letter}" if size == 1 and full.get(letter, 1) != 1 else letter
        for letter, size in zip(_letters(call, name), call.shape(name), strict=True)
    )


def layouts(call: LeadingCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of every operand and of every result."""
    results = (
        layout(call, name) if call.spec.is_backward else " ".join(_letters(call, name))
        for name in call.spec.result_names
    )
    return tuple(layout(call, name) for name in call.options.operands), tuple(results)


def further_layouts(call: LeadingCall, shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """The axes of arrays that follow the operands: b0, b1, …, and unique ones, which stay whole."""
    return tuple(
        " ".join(
            f"b{i}" if i < len(call.dims) and size == call.dims[i] else f"f{position}x{i}"
            for i, size in enumerate(shape)
        )
        for position, shape in enumerate(shapes)
    )


def _letters(call: LeadingCall, name: str) -> list[str]:
    """The axes of an operand or result as if it were broadcast along none; first b0, b1, …"""
    if is_mod_operand(name):
        # Such an array is whole on every device: a mod may read any part of it.
        position, rank = call.options.operands.index(name), len(call.shape(name)) - len(call.dims)
        inner = [f"m{position}x{i}" for i in range(rank)]
    else:
        _, *inner = listed(name).axes
    return [*(f"b{i}" for i in range(len(call.dims))), *inner]


def is_repeated(name: str, options: AttentionOptions) -> bool:
    """Whether an operand is the same array as query_segment_ids, which devices exchange once."""
    return name == "key_value_segment_ids" and options.meaning.same_lengths


def numbered_axes(call: LeadingCall) -> dict[str, int]:
    """The axes along which a call may be split, by their letters, each with its size."""
    return {f"b{i}": size for i, size in enumerate(call.dims)} | {"n": call.spec.num_heads}


def key_operand(call: LeadingCall) -> str:
    """The operand whose sharding says how keys are split."""
    return "key_pages" if call.spec.is_paged else "key"


@dataclass(frozen=True)
class Shards:
    """The mesh axes that split one call."""

    sizes: tuple[tuple[str, int], ...]
    """Every mesh axis and its number of devices."""
    leading: tuple[tuple[str, ...], ...]
    """The axes that split each leading dim."""
    kv_heads: tuple[str, ...]
    """The axes that split kv heads, and query heads with them."""
    groups: tuple[str, ...]
    """The axes that split query heads further; kv heads are whole along them."""
    unused: tuple[tuple[str, int], ...]
    """The axes that split query but not the call, each with its number of devices."""
    rows: tuple[str, ...] = ()
    """The axes that split rows and keys."""
    strategy: Strategy | None = None
    """How devices along `rows` exchange keys, or along `keys` merge results."""
    order: SequenceOrder = "contiguous"
    """The order of rows and keys."""
    keys: tuple[str, ...] = ()
    """The axes that split keys, or the pages of a pool, alone; rows are whole."""

    @property
    def heads(self) -> tuple[str, ...]:
        """The axes that split query heads; the first of them split kv heads as well."""
        return self.kv_heads + self.groups

    def ways(self, axes: tuple[str, ...]) -> int:
        """The number of devices along these axes."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def spec_of(self, axes_by_letter: str) -> P:
        """The partition spec of an array with these axes."""
        letters = axes_by_letter.split()
        split = self._by_letter | {"k": self.kv_heads}
        # What has both rows and keys, shared or not, is split along rows alone.
        has_rows = any(x.endswith("t") for x in letters)
        split["s"] = self.keys if has_rows else self.rows + self.keys
        split["p"] = self.keys
        return P(*(split.get(letter) or None for letter in letters))

    def summed(self, call: LeadingCall, name: str) -> tuple[str, ...]:
        """The mesh axes over which the gradient of this operand must be summed."""
        have, full = layout(call, name).split(), _letters(call, name)
        shared = [a for x in full if x not in have for a in self._by_letter.get(x, ())]
        if "t" not in full and "s" not in full:
            shared += self.rows
        if "t" in full and "s" in full and "s" not in have:
            shared += self.keys
        if is_mod_operand(name):
            return (*shared, *self.heads)
        return (*shared, *(self.groups if "k" in full else ()))

    @property
    def _by_letter(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes that split each axis of query."""
        leading = {f"b{i}": axes for i, axes in enumerate(self.leading)}
        return leading | {"n": self.heads, "t": self.rows}

    @property
    def context(self) -> Context | None:
        """How rows and keys are spread; None if they are whole."""
        if self.strategy is None:
            return None
        axes = self.rows + self.keys
        return Context(axes, self.ways(axes), self.order, self.strategy)

    def begin(self, call: LeadingCall) -> Begin:
        """Where this device's part of the call begins, by its position along the mesh axes."""
        sizes = numbered_axes(call)

        def begin(letter: str) -> jax.Array | int:
            axes = self._by_letter[letter]
            return _index(axes) * (sizes[letter] // self.ways(axes))

        return begin

    def own_kv_heads(self, spec: AttentionSpec, begin: Begin) -> jax.Array | None:
        """Numbers of local kv heads, one for each equal run of this device's query heads.

        None if the device uses its local kv heads as they are, in order. `spec` is the spec of the
        whole call.
        """
        here = spec.num_kv_heads // self.ways(self.kv_heads)
        if not self.groups or here == 1:
            return None
        group = spec.num_heads // spec.num_kv_heads
        own = spec.num_heads // self.ways(self.heads)
        run = math.gcd(own, group)
        first = begin("n") % (spec.num_heads // self.ways(self.kv_heads))
        return (first + jnp.arange(0, own, run)) // group

    def own_dropout(self, call: LeadingCall, begin: Begin, key: jax.Array) -> dict[str, jax.Array]:
        """dropout_key and dropout_start (operands.py) for this device's rows and heads.

        Args:
          call: the whole call.
          begin: where this device's part begins.
          key: this device's part of the dropout key.
        """
        start = self.start(call, begin, "dropout_key")
        leading = jnp.broadcast_shapes(start.shape[:-1], key.shape[:-1])
        return {
            "dropout_key": jnp.broadcast_to(key, (*leading, *key.shape[-1:])),
            "dropout_start": jnp.broadcast_to(start, (*leading, 2)),
        }

    def start(self, call: LeadingCall, begin: Begin, name: str) -> jax.Array:
        """The first row and head of this device's part, int32 [*leading dims, 2].

        Rows are counted over the whole call's dims along which the operand of this name is shared.
        From the last split dim on, this device's rows are consecutive and have one start; dims
        before that have a start for each index.
        """
        number = len(call.dims)
        own = [size // self.ways(axes) for size, axes in zip(call.dims, self.leading, strict=True)]
        shared = [i for i in range(number) if call.leading(name)[i] == 1]
        further = max((i for i in shared if own[i] < call.dims[i]), default=0)
        row = jnp.zeros((1,) * number, jnp.int32)
        for i in shared:
            within = jnp.arange(own[i]) if i < further else jnp.zeros(1, jnp.int32)
            at = begin(f"b{i}") + within
            at = at * math.prod(call.dims[i + 1 :])
            row = row + at.astype(jnp.int32).reshape(-1, *(1 for _ in range(i + 1, number)))
        row = row[..., None]
        return jnp.concatenate([row, jnp.full_like(row, begin("n"))], axis=-1)


@dataclass(frozen=True)
class Shardings:
    """How the arrays of a call are sharded outside of it."""

    operands: Mapping[str, P]
    results: tuple[P | None, ...]
    """None for a result whose sharding is not known."""

    @staticmethod
    def like_operands(spec: AttentionSpec, operands: Mapping[str, P]) -> Shardings:
        """The shardings of a call with Explicit axes: a gradient has its operand's, other results
        have query's."""
        if spec.is_backward:
            return Shardings(operands, tuple(operands[x] for x in spec.wanted.gradients))
        *leading, rows, heads, _ = operands["query"]
        by_row = P(*leading, heads, rows)
        found = {
            "out": P(*leading, rows, heads, None),
            "lse": by_row,
            "row_max": by_row,
            "keep": P(*leading, heads, rows, None),
        }
        return Shardings(operands, tuple(found[x] for x in spec.result_names))


def own_operands(
    shards: Shards, call: LeadingCall, operands: Sequence[jax.Array], begin: Begin
) -> tuple[AttentionOptions, tuple[jax.Array, ...]]:
    """The call of one device: its options, and its operands from its part of the whole call's."""
    own, options = dict(zip(call.options.operands, operands, strict=True)), call.options
    heads = shards.own_kv_heads(call.spec, begin)
    if heads is not None:
        for name in (x for x in OF_KV_HEADS if x in own):
            own[name] = jnp.take(own[name], heads, axis=-2, mode="clip")
    if "dropout_key" in own and (any(shards.leading) or shards.heads):
        own |= shards.own_dropout(call, begin, own["dropout_key"])
        options = with_dropout_start(options)
    if "mods_start" in own:
        own["mods_start"] = own["mods_start"] + shards.start(call, begin, "mods_start")
    return options, tuple(own[name] for name in options.operands)


def shard_call(
    bind: Bind,
    call: LeadingCall,
    shards: Shards,
    operands: Sequence[jax.Array],
    begin: Begin | None = None,
    *,
    summed: Callable[[str], tuple[str, ...]] | None = None,
) -> tuple[jax.Array, ...]:
    """The results of the call on one device; gradients are summed over devices that share them.

    Args:
      bind: returns, for options, the function that computes one device's call.
      call: the whole call.
      shards: how it is split.
      operands: this device's parts of the whole call's operands, split by `Shards.spec_of`, and
        of the arrays that follow them.
      begin: where this device's part begins; None means by its position along the mesh axes.
      summed: the mesh axes over which the gradient of an operand is summed, if they are not those
        of `Shards.summed`.
    """
    begin = shards.begin(call) if begin is None else begin
    count = len(call.options.operands)
    options, own = own_operands(shards, call, operands[:count], begin)
    if shards.context is not None:
        # Arrays that follow the operands are of whole rows, and a piece makes its own.
        results = compute.results(bind, options, own, shards.context)
    else:
        results = LeadingCall.of(own, options).results_by(bind, (*own, *operands[count:]))
    if not options.wanted.gradients:
        return results
    heads = shards.own_kv_heads(call.spec, begin)
    here = call.spec.num_kv_heads // shards.ways(shards.kv_heads)
    gradients: list[jax.Array] = []
    for name, x in zip(options.wanted.gradients, results, strict=True):
        over = shards.summed(call, name) if summed is None else summed(name)
        if over:
            # 16-bit numbers are added up as float32.
            dtype, x = x.dtype, x.astype(np.promote_types(x.dtype, np.float32))
            if heads is not None and name in ("key", "value"):
                whole = jnp.zeros((*x.shape[:-2], here, x.shape[-1]), x.dtype)
                x = whole.at[..., heads, :].add(x)
            x = cast("jax.Array", jax.lax.psum(x, over)).astype(dtype)
        gradients.append(x)
    return tuple(gradients)


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    """The position of this device along the axes."""
    return jax.lax.axis_index(axes) if axes else 0


def entry(spec: P, position: int) -> tuple[str, ...]:
    """The mesh axes that split one dim of an array."""
    found = spec[position] if position < len(spec) else None
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)
