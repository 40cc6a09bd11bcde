"""What one device computes of a call whose arrays are sharded: which mesh axes split it, and how.

Batch and heads are split, nothing else. Where the devices of a mesh axis outnumber the kv heads,
each takes the query heads that are its own and, of kv heads that all of them hold, those that its
query heads use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.spec import AttentionOptions, AttentionSpec, with_dropout_start

Bind = Callable[[AttentionOptions], Callable[..., list[jax.Array]]]
"""Of options the call that one device computes, of its operands."""

LAYOUTS = {
    "query": "b t n h",
    "key": "b s k h",
    "value": "b s k v",
    "bias": "b n t s",
    "mask": "b n t s",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_segment_ids": "b t",
    "key_value_segment_ids": "b s",
    "cu_seqlens_q": "b m",
    "cu_seqlens_kv": "b m",
    "window": "b e",
    "alibi_slopes": "b n",
    "sinks": "b n",
    "dropout_key": "d w",
    "dropout_start": "d p",
    "out": "b t n v",
    "out_grad": "b t n v",
    "lse": "b n t",
    "lse_grad": "b n t",
    "row_max": "b n t",
    "keep": "b n t s",
}
"""The axes of operands and results by letter, as in spec.py. Dropout keys lie whole everywhere."""


def layout(spec: AttentionSpec, name: str) -> str:
    """The axes of an operand; one that is broadcast along goes together with no other."""
    full = {"b": spec.batch, "n": spec.num_heads, "t": spec.seq_len_q, "s": spec.seq_len_kv}
    position = spec.options.operands.index(name)
    return " ".join(
        f"u{position}{letter}" if size == 1 and full.get(letter, 1) != 1 else letter
        for letter, size in zip(LAYOUTS[name].split(), spec.shape(name), strict=True)
    )


@dataclass(frozen=True)
class Shards:
    """The mesh axes that split one call."""

    sizes: tuple[tuple[str, int], ...]
    """Every mesh axis and its number of devices."""
    batch: tuple[str, ...]
    kv_heads: tuple[str, ...]
    """These split kv heads, and query heads with them."""
    groups: tuple[str, ...]
    """These split query heads further; kv heads lie whole along them."""
    unused: tuple[tuple[str, int], ...]
    """These, with their numbers of devices, split query, and not the call."""

    @staticmethod
    def of(spec: AttentionSpec, sizes: Mapping[str, int], query: P, key: P) -> Shards:
        """Split as query is, as far as its axes divide; where it is whole, as key is.

        An axis that splits query otherwise, along its length above all, splits heads in place of
        that, or else batch.
        """
        batch, rows, heads, dims = (_entry(query, i) for i in range(4))
        given = batch + rows + heads + dims
        batch = batch or tuple(x for x in _entry(key, 0) if x not in rows + heads + dims)
        heads = heads or tuple(x for x in _entry(key, 2) if x not in batch + rows + dims)
        heads = _dividing(sizes, heads + rows + dims, spec.num_heads)
        batch += tuple(x for x in rows + dims if x not in heads)
        batch = _dividing(sizes, batch, spec.batch)
        kv_heads = _dividing(sizes, heads, spec.num_kv_heads)
        unused = tuple((x, sizes[x]) for x in given if x not in batch + heads and sizes[x] > 1)
        return Shards(tuple(sizes.items()), batch, kv_heads, heads[len(kv_heads) :], unused)

    @property
    def heads(self) -> tuple[str, ...]:
        """Those that split query heads, the first of them kv heads as well."""
        return self.kv_heads + self.groups

    def ways(self, axes: tuple[str, ...]) -> int:
        """The number of devices along these axes."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def spec_of(self, axes_by_letter: str) -> P:
        """How an array with these axes lies on the mesh."""
        split = {"b": self.batch, "n": self.heads, "k": self.kv_heads}
        return P(*(split.get(letter) or None for letter in axes_by_letter.split()))

    def summed(self, spec: AttentionSpec, name: str) -> tuple[str, ...]:
        """The mesh axes over whose devices the gradient of this operand is a sum."""
        have, full = layout(spec, name).split(), LAYOUTS[name].split()
        split = {"b": self.batch, "n": self.heads}
        shared = [axis for x in full if x not in have for axis in split.get(x, ())]
        return (*shared, *(self.groups if "k" in full else ()))

    def own_kv_heads(self, spec: AttentionSpec) -> jax.Array | None:
        """Of the kv heads that lie here, one for each equal run of this device's query heads.

        `spec` is of the whole call. None where those that lie here are those it takes, in order.
        """
        here = spec.num_kv_heads // self.ways(self.kv_heads)
        if not self.groups or here == 1:
            return None
        group = spec.num_heads // spec.num_kv_heads
        own = spec.num_heads // self.ways(self.heads)
        run = math.gcd(own, group)
        return (_index(self.groups) * own + jnp.arange(0, own, run)) // group

    def own_dropout(
        self, spec: AttentionSpec, operands: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """dropout_key and dropout_start (spec.py) of this device's rows and heads.

        `spec` and `operands` are of the whole call.
        """
        keys = operands["dropout_key"]
        starts = operands.get("dropout_start", jnp.zeros((keys.shape[0], 2), jnp.int32))
        rows_of_a_key = spec.batch // keys.shape[0]
        own = spec.batch // self.ways(self.batch)
        run = math.gcd(own, rows_of_a_key)
        rows = _index(self.batch) * own + jnp.arange(0, own, run)
        head = _index(self.heads) * (spec.num_heads // self.ways(self.heads))
        further = jnp.stack([rows % rows_of_a_key, jnp.broadcast_to(head, rows.shape)], axis=1)
        key = rows // rows_of_a_key
        return {
            "dropout_key": keys[key],
            "dropout_start": starts[key] + further.astype(jnp.int32),
        }


def own_operands(
    shards: Shards, spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[AttentionOptions, tuple[jax.Array, ...]]:
    """The call of one device: options and operands, of what lies there of the whole call's."""
    own, options = dict(operands), spec.options
    heads = shards.own_kv_heads(spec)
    if heads is not None:
        for name in ("key", "value"):
            own[name] = jnp.take(own[name], heads, axis=2, mode="clip")
    if "dropout_key" in own and (shards.batch or shards.heads):
        own |= shards.own_dropout(spec, own)
        options = with_dropout_start(options)
    return options, tuple(own[name] for name in options.operands)


def shard_call(
    bind: Bind, spec: AttentionSpec, shards: Shards, operands: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """What one device computes of the call, the sums of gradients over devices made.

    Args:
      bind: makes of options the call that one device computes.
      spec: the whole call.
      shards: how it is split.
      operands: of the whole call's operands what lies on this device, as `Shards.spec_of` splits.
    """
    by_name = dict(zip(spec.options.operands, operands, strict=True))
    options, own = own_operands(shards, spec, by_name)
    results = bind(options)(*own)
    if not spec.is_backward:
        return tuple(results)
    heads = shards.own_kv_heads(spec)
    here = spec.num_kv_heads // shards.ways(shards.kv_heads)
    gradients = []
    for name, x in zip(options.gradients, results, strict=True):
        over = shards.summed(spec, name)
        if over:
            # 16-bit numbers are added up as float32.
            dtype, x = x.dtype, x.astype(np.promote_types(x.dtype, np.float32))
            if heads is not None and name in ("key", "value"):
                whole = jnp.zeros((*x.shape[:2], here, x.shape[3]), x.dtype)
                x = whole.at[:, :, heads].add(x)
            x = jax.lax.psum(x, over).astype(dtype)
        gradients.append(x)
    return tuple(gradients)


def layouts(spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of every operand and of every result."""
    results = (
        layout(spec, name) if spec.is_backward else LAYOUTS[name] for name in spec.result_names
    )
    return tuple(layout(spec, name) for name in spec.options.operands), tuple(results)


def _index(axes: tuple[str, ...]) -> Any:
    """The number of this device along the axes."""
    return jax.lax.axis_index(axes) if axes else 0


def _entry(spec: P, position: int) -> tuple[str, ...]:
    entry = spec[position] if position < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(sizes: Mapping[str, int], axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The leading mesh axes that together divide `size`."""
    while size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes
