"""Equinox: `MultiheadAttention` computed by attn_dispatch, new or in place of a model's layers.

layer = MultiheadAttention(num_heads=8, query_size=512, num_kv_heads=2, key=key)
model = replace_attention(model)  # every eqx.nn.MultiheadAttention of a model
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeGuard, TypeVar, Unpack, cast  # noqa: TID251  # the arguments of Equinox's layer

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.foreign_names import check_names
from attn_dispatch.call.keywords import LayerOptions
from attn_dispatch.integrations.layers import (
    as_bool,
    check_no_conflict,
    check_not_given,
    check_options,
    check_static_values,
    has_name_of_attention,
    is_array,
    text_of,
    warn_of_staying,
)
from attn_dispatch.warning import skip_frames_of

skip_frames_of(eqx.__file__)

Model = TypeVar("Model")

_OWN_DROPOUT = {"dropout_rate": "the layer's dropout_p", "dropout_key": "key"}


_REMEDY = (
    "Use MultiheadAttention of attn_dispatch.integrations.equinox in place of a layer, or call "
    "attn_dispatch.dot_product_attention in it"
)


class _Options(LayerOptions, total=False):
    bias: ArrayLike | None
    scale: ArrayLike | None
    is_causal: bool


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention`, with all heads in one call.

    It has the same arguments, parameters (the same ones for the same key) and dtypes. The dropout
    mask differs from the one that Equinox draws with the same key.
    """

    num_kv_heads: int = eqx.field(static=True)
    options: tuple[tuple[str, object], ...] = eqx.field(static=True)
    """What `replace_attention` was given for every call, by name."""

    def __init__(
        self,
        num_heads: int,
        *args: Any,
        num_kv_heads: int | None = None,
        key: jax.Array,
        **kwargs: Any,
    ) -> None:
        """Make a layer.

        Args:
          num_heads: the number of query heads.
          args: as for `equinox.nn.MultiheadAttention`, query_size first.
          num_kv_heads: the number of heads of key and value, each for num_heads // num_kv_heads
            query heads; None means num_heads.
          key: for the weights.
          kwargs: as for `equinox.nn.MultiheadAttention`.

        Raises:
          ValueError: num_heads is not a multiple of num_kv_heads.
        """
        super().__init__(num_heads, *args, key=key, **kwargs)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.options = ()
        if self.num_kv_heads == num_heads:
            return
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of {num_heads}, got {num_kv_heads}")
        _, key_key, value_key, _ = jax.random.split(key, 4)
        self.key_proj = _narrower(self.key_proj, self.num_kv_heads * self.qk_size, key_key)
        self.value_proj = _narrower(self.value_proj, self.num_kv_heads * self.vo_size, value_key)

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        **options: Unpack[_Options],
    ) -> jax.Array:
        """Attend.

        Args:
          query: [T, query_size].
          key_: [S, key_size].
          value: [S, value_size].
          mask: [T, S] or [N, T, S], attend where it is not 0.
          key: for dropout.
          inference: whether to drop nothing; None means what the layer was made with.
          deterministic: an older name of inference; passing it warns.
          process_heads: a function of the projected (query, key, value), each
            [length, heads, dim], that returns the three in the same shapes.
          options: further arguments of `attn_dispatch.dot_product_attention`, such as is_causal.

        Returns:
          [T, output_size].

        Raises:
          RuntimeError: there is dropout, but no key.
          ValueError: shapes do not match, or options ask for dropout or further results.
        """
        check_options(options, _OWN_DROPOUT)
        kept = dict(self.options)
        check_no_conflict(kept, options, {}, "replace_attention")
        options = cast("_Options", options | kept)
        options["qkv_layout"] = "BTNH"
        for name, x in (("query", query), ("key_", key_), ("value", value)):
            if jnp.ndim(x) != 2:
                raise ValueError(
                    f"{name}: expected [length, size], got {list(jnp.shape(x))}; jax.vmap maps the "
                    "layer over a batch"
                )
        if deterministic is not None:
            inference = deterministic
            warnings.warn("MultiheadAttention: pass inference, not deterministic", stacklevel=2)
        heads = (
            _heads(self.query_proj, query, self.num_heads),
            _heads(self.key_proj, key_, self.num_kv_heads),
            _heads(self.value_proj, value, self.num_kv_heads),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    f"process_heads: expected heads of the shapes {shapes}, got "
                    f"{[x.shape for x in heads]}"
                )
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*heads)
        rate = self._dropout_rate(inference)
        if rate and key is None:
            raise RuntimeError("MultiheadAttention: expected a key for dropout, got None")
        q, k, v = (x.astype(dtype) for x in heads)
        out = dot_product_attention(
            q,
            k,
            v,
            mask=None if mask is None else as_bool(mask),
            dropout_rate=rate,
            dropout_key=key if rate else None,
            **options,
        )
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))

    def _dropout_rate(self, inference: bool | None) -> float:
        is_off = self.dropout.inference if inference is None else inference
        return 0.0 if is_off else float(self.dropout.p)


def replace_attention(model: Model, **options: Unpack[_Options]) -> Model:
    """The model with this module's layer in place of every `equinox.nn.MultiheadAttention`.

        model = replace_attention(model, is_causal=True)

    Parameters keep their values and places. Subclasses of Equinox's layer are not replaced, nor are
    this module's layers. A warning names layers that stay beside replaced ones: subclasses, modules
    whose class is named like attention, such as SelfAttention, and layers with other options.

    Args:
      model: any pytree.
      options: arguments of `attn_dispatch.dot_product_attention` for every call of the layers, but
        no arrays, which would become parameters. A call that passes something else for one of them
        is a ValueError.

    Raises:
      TypeError: there is no such option.
      ValueError: there is no such layer, or they were all replaced already; an option is an array
        or of each call; or as for the layer's options.
    """
    check_options(options, _OWN_DROPOUT)
    check_names(dot_product_attention, options)
    check_not_given(options, ("query", "key", "value", "mask"), "replace_attention")
    for name, x in options.items():
        if is_array(x):
            raise ValueError(f"{name}: expected no array, got {text_of(x)}; pass it in each call")
    check_static_values(options)
    found: list[eqx.nn.MultiheadAttention] = []

    def is_theirs(x: object) -> TypeGuard[eqx.nn.MultiheadAttention]:
        return type(x) is eqx.nn.MultiheadAttention

    def replaced(x: object) -> object:
        if not is_theirs(x):
            return x
        found.append(x)
        return _like(x, tuple(options.items()))

    others = _other_layers(model)
    model = jax.tree.map(replaced, model, is_leaf=is_theirs)
    if not found:
        names = "; ".join(_described(*x) for x in others)
        raise ValueError(
            "replace_attention: expected a model with eqx.nn.MultiheadAttention in it, got none"
            + f"; found {names}" * bool(names)
        )
    kept = dict[str, object](options)
    staying = [x for x in others if not _is_ours(x[1]) or (kept and dict(x[1].options) != kept)]
    warn_of_staying([_described(*x) for x in staying], options, _REMEDY)
    return model


def _other_layers(model: object) -> list[tuple[str, eqx.Module]]:
    """The attention layers that are not replaced, with their places."""

    def is_theirs(x: object) -> bool:
        return isinstance(x, eqx.nn.MultiheadAttention)

    def is_layer(x: object) -> bool:
        if is_theirs(x) or not isinstance(x, eqx.Module) or not has_name_of_attention(x):
            return is_theirs(x)
        return not any(map(is_theirs, jax.tree.leaves(x, is_leaf=is_theirs)))

    leaves = cast(
        "list[tuple[tuple[object, ...], object]]",
        jax.tree.leaves_with_path(model, is_leaf=is_layer),
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x)
        for path, x in leaves
        if isinstance(x, eqx.Module) and is_layer(x) and type(x) is not eqx.nn.MultiheadAttention
    ]


def _is_ours(layer: eqx.Module) -> TypeGuard[MultiheadAttention]:
    return isinstance(layer, MultiheadAttention)


def _described(place: str, layer: eqx.Module) -> str:
    text = type(layer).__name__ + " of attn_dispatch already" * _is_ours(layer)
    return f"{place}: {text}" if place else text


def _like(
    layer: eqx.nn.MultiheadAttention, options: tuple[tuple[str, object], ...]
) -> MultiheadAttention:
    ours = object.__new__(MultiheadAttention)
    for field in fields(layer):
        object.__setattr__(ours, field.name, getattr(layer, field.name))
    object.__setattr__(ours, "num_kv_heads", layer.num_heads)
    object.__setattr__(ours, "options", options)
    return ours


def _narrower(linear: eqx.nn.Linear, out_features: int, key: jax.Array) -> eqx.nn.Linear:
    dtype, use_bias = linear.weight.dtype, linear.bias is not None
    return eqx.nn.Linear(linear.in_features, out_features, use_bias=use_bias, dtype=dtype, key=key)


def _heads(linear: eqx.nn.Linear, x: jax.Array, num_heads: int) -> jax.Array:
    """[L, size] as [L, num_heads, H]."""
    return jax.vmap(linear)(x).reshape(x.shape[0], num_heads, -1)
