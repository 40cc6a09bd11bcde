"""Penzai: replaces a model's attention layers with layers that never make the weights.

model = replace_attention(model)  # every pz.nn.Attention and pz.nn.KVCachingAttention
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TypedDict, TypeVar

import jax
import jax.numpy as jnp
import penzai
from penzai import pz

from attn_dispatch.api import dot_product_attention
from attn_dispatch.warning import skip_frames_of

skip_frames_of(penzai.__file__)

_MASKS = (
    pz.nn.ApplyExplicitAttentionMask,
    pz.nn.ApplyCausalAttentionMask,
    pz.nn.ApplyCausalSlidingWindowAttentionMask,
)
_LAYERS = (pz.nn.Attention, pz.nn.KVCachingAttention)

_Mask = (
    pz.nn.ApplyExplicitAttentionMask
    | pz.nn.ApplyCausalAttentionMask
    | pz.nn.ApplyCausalSlidingWindowAttentionMask
)
Model = TypeVar("Model")
_Axis = Hashable
_QueryAndKey = tuple[pz.nx.NamedArray, pz.nx.NamedArray]


@pz.pytree_dataclass
class QueryAndKey(pz.nn.Layer):
    """Replaces the layer that made attention weights: passes query and key on to `Attend`."""

    def __call__(self, query_and_key: _QueryAndKey, **_: object) -> _QueryAndKey:
        return query_and_key


@pz.pytree_dataclass
class Attend(pz.nn.Layer):
    """Attention computed by attn_dispatch.

    Axes that only the query has are query heads that share a kv head.
    """

    masks: tuple[_Mask, ...]
    scale: jax.Array | None
    """The scale; None means 1."""
    soft_cap: float | None = dataclasses.field(metadata={"pytree_node": False})
    seq: str = dataclasses.field(metadata={"pytree_node": False})
    kv_seq: str = dataclasses.field(metadata={"pytree_node": False})
    heads: tuple[str, ...] = dataclasses.field(metadata={"pytree_node": False})
    """The head axes of query, key and value."""
    groups: tuple[str, ...] = dataclasses.field(metadata={"pytree_node": False})
    """The head axes of the query alone."""
    head_dim: str = dataclasses.field(metadata={"pytree_node": False})
    value_dim: str = dataclasses.field(metadata={"pytree_node": False})

    def __call__(
        self, arrays: tuple[_QueryAndKey, pz.nx.NamedArray], **side_inputs: object
    ) -> pz.nx.NamedArray:
        """Attend; `arrays` is ((query, key), value), named arrays with further axes as batch."""
        (query, key), value = arrays
        own = {self.seq, self.head_dim, *self.heads, *self.groups}
        batch = tuple(x for x in query.named_shape if x not in own)
        sizes = query.named_shape
        dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)

        def plain(x: pz.nx.NamedArray, heads: tuple[str, ...], dim: str) -> jax.Array:
            """[*batch, length, heads, dim]."""
            full = x.broadcast_to(named_shape={y: sizes[y] for y in batch} | dict(x.named_shape))
            array = full.unwrap(*batch, self.seq, *heads, dim).astype(dtype)
            lead = array.shape[: len(batch) + 1]
            return array.reshape(*lead, -1, array.shape[-1])

        q = plain(query, (*self.heads, *self.groups), self.head_dim)
        k, v = plain(key, self.heads, self.head_dim), plain(value, self.heads, self.value_dim)
        out = dot_product_attention(
            q,
            k,
            v,
            mask=self._mask(batch, sizes, key, side_inputs),
            scale=1.0 if self.scale is None else self.scale,
            logits_soft_cap=self.soft_cap,
            qkv_layout="BTNH",
        )
        names = (*batch, self.seq, *self.heads, *self.groups, self.value_dim)
        shape = [sizes[x] for x in names[:-1]]
        return pz.nx.wrap(out.reshape(*shape, out.shape[-1])).tag(*names)

    def _mask(
        self,
        batch: tuple[_Axis, ...],
        sizes: Mapping[_Axis, int],
        key: pz.nx.NamedArray,
        side_inputs: Mapping[str, object],
    ) -> jax.Array | None:
        """The mask [*batch, heads, queries, keys]: the pairs whose score no mask layer replaces.

        It is computed by the mask layers, applied to scores of 1.
        """
        if not self.masks:
            return None
        names = (*batch, *self.heads, *self.groups, self.seq, self.kv_seq)
        all_sizes = dict(sizes) | {self.kv_seq: key.named_shape[self.seq]}
        scores = pz.nx.ones({self.seq: sizes[self.seq], self.kv_seq: all_sizes[self.kv_seq]})
        for layer in self.masks:
            layer = dataclasses.replace(layer, masked_out_value=jnp.float32(0))
            scores = layer(scores, **side_inputs)
        shape: dict[_Axis, int] = {x: scores.named_shape.get(x, 1) for x in names}
        full = scores.broadcast_to(named_shape=shape).unwrap(*names)
        lead, (t, s) = full.shape[: len(batch)], full.shape[-2:]
        heads = full.shape[len(batch) : -2]
        if any(x != 1 for x in heads):
            full = jnp.broadcast_to(full, (*lead, *(all_sizes[x] for x in names[len(batch) :])))
        return full.reshape(*lead, -1, t, s) != 0


def replace_attention(model: Model) -> Model:
    """The model with attn_dispatch in every `pz.nn.Attention` and `pz.nn.KVCachingAttention`.

    Projections, parameters, caches and their names stay. Only the layers that compute weights, and
    their product with the values, are replaced. Layers replaced already stay as they are.

    Raises:
      ValueError: there is no such layer, or one has an unknown step, which the message names.
    """
    found = pz.select(model).at_instances_of(_LAYERS)
    if not found.count():
        raise ValueError("replace_attention: expected a model with pz.nn.Attention in it, got none")
    return found.apply(_replaced)


def _replaced(layer: pz.nn.Attention | pz.nn.KVCachingAttention) -> pz.nn.Layer:
    if isinstance(layer.query_key_to_attn, QueryAndKey):
        return layer
    scores, *steps = _steps(layer.query_key_to_attn)
    combine, *after = _steps(layer.attn_value_to_output)
    axes = _axes(_product(scores), _product(combine))
    masks: list[_Mask] = []
    soft_cap, scale = None, None
    *steps, last = steps
    if not isinstance(last, pz.nn.Softmax) or last.axes not in (axes["kv_seq"], (axes["kv_seq"],)):
        raise _unknown(last, "a softmax over the keys")
    for step in steps:
        if isinstance(step, _MASKS):
            masks.append(step)
        elif isinstance(step, pz.nn.TanhSoftCap) and not masks and soft_cap is None:
            soft_cap = float(step.soft_cap)
        elif isinstance(step, pz.nn.ConstantRescale) and not masks and soft_cap is None:
            by = jnp.asarray(step.by, jnp.float32)
            scale = by if scale is None else scale * by
        else:
            raise _unknown(step, "a rescaling, a soft cap and then masks")
    attend = Attend(masks=tuple(masks), soft_cap=soft_cap, scale=scale, **axes)
    return dataclasses.replace(
        layer,
        query_key_to_attn=QueryAndKey(),
        attn_value_to_output=pz.nn.Sequential([attend, *after]),
    )


def _steps(layer: pz.nn.Layer) -> list[pz.nn.Layer]:
    return list(layer.sublayers) if isinstance(layer, pz.nn.Sequential) else [layer]


class _Axes(TypedDict):
    """The fields of `Attend` that name axes."""

    seq: str
    kv_seq: str
    heads: tuple[str, ...]
    groups: tuple[str, ...]
    head_dim: str
    value_dim: str


def _product(step: pz.nn.Layer) -> pz.nn.NamedEinsum:
    if not isinstance(step, pz.nn.NamedEinsum) or len(step.input_axes) != 2:
        raise _unknown(step, "a NamedEinsum of two arrays")
    return step


def _axes(scores: pz.nn.NamedEinsum, combine: pz.nn.NamedEinsum) -> _Axes:
    """The axes of the two products."""
    query, key = map(_spec, scores.input_axes)
    weights, value = map(_spec, combine.input_axes)
    made, out = _spec(scores.output_axes), _spec(combine.output_axes)
    at_query, at_key = set(query.values()), set(key.values())
    contracted = [x for x, y in query.items() if y in at_key and y not in made.values()]
    heads = tuple(x for x, y in query.items() if y in at_key and y in made.values())
    alone = [x for x, y in query.items() if y not in at_key]
    of_keys = [x for x, y in key.items() if y not in at_query]
    seqs = [x for x in alone if x in of_keys]
    kv_seqs = [x for x, y in made.items() if key.get(of_keys[0] if of_keys else "") == y]
    value_dims = [x for x, y in value.items() if y not in weights.values()]
    lists = (contracted, of_keys, seqs, kv_seqs, value_dims)
    keys_of_values = [
        x for x, y in value.items() if weights.get(kv_seqs[0] if kv_seqs else "") == y
    ]
    groups = tuple(x for x in alone if x not in seqs)
    fits = all(len(x) == 1 for x in lists) and keys_of_values == seqs
    if not fits or set(out) != {*seqs, *heads, *groups, *value_dims} or set(made) != set(weights):
        raise _unknown(scores, "query · key over one axis of lengths and one that is contracted")
    return {
        "seq": seqs[0], "kv_seq": kv_seqs[0], "heads": heads, "groups": groups,
        "head_dim": contracted[0], "value_dim": value_dims[0],
    }  # fmt: skip


def _spec(axes: tuple[str, ...] | dict[str, str]) -> dict[str, str]:
    return {x: x for x in axes} if isinstance(axes, tuple) else dict(axes)


def _unknown(step: pz.nn.Layer, expected: str) -> ValueError:
    return ValueError(f"replace_attention: expected {expected}, got {type(step).__name__}")
