"""An attention layer of each framework, and ours in its place, for tests/integrations.

`LAYERS` has both by the framework's name, as functions of the parameters. A framework is imported
when its layer is made.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

B, T, N, K, D = 4, 12, 4, 2, 32
RATE = 0.4

_rng = np.random.default_rng(7)
X = _rng.standard_normal((B, T, D)).astype(np.float32)
MASK = (_rng.random((B, 1, T, T)) < 0.6) | np.eye(T, dtype=bool)
CAUSAL = np.tril(np.ones((T, T), bool))[None, None]

Run = Callable[..., jax.Array]
"""(params, x, mask=None, is_causal=False, key=None) -> [B, T, D]; with a key there is dropout."""


@dataclass(frozen=True)
class Layer:
    package: str
    make: Callable[..., tuple[Any, Run, Run]]
    """(rate) -> parameters, the framework's layer, and the same layer with our attention."""
    has_dropout: bool = True


def nnx(rate: float = 0.0) -> tuple[Any, Run, Run]:
    from flax import nnx

    from attn_dispatch.integrations import flax as ours

    # Flax has num_kv_heads and is_causal since 0.12.8.
    has_groups = "num_kv_heads" in inspect.signature(nnx.MultiHeadAttention).parameters
    has_causal = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
    groups = {"num_kv_heads": K} if has_groups else {}

    def make(**more: Any) -> Any:
        return nnx.MultiHeadAttention(
            N, D, dropout_rate=rate, broadcast_dropout=False, decode=False, rngs=nnx.Rngs(0),
            keep_rngs=False, **groups, **more,
        )  # fmt: skip

    params = nnx.split(make())[1]

    def run(graph: Any) -> Run:
        def call(params, x, mask=None, is_causal=False, key=None):
            layer = nnx.merge(graph, params)
            rngs = None if key is None else nnx.Rngs(dropout=key)
            causal = {"is_causal": is_causal} if has_causal else {}
            if is_causal and not has_causal:
                mask = CAUSAL if mask is None else mask & CAUSAL
            return layer(x, mask=mask, deterministic=key is None, rngs=rngs, **causal)

        return call

    original, with_ours = make(), make(attention_fn=ours.attention_fn)
    return params, run(nnx.split(original)[0]), run(nnx.split(with_ours)[0])


def linen(rate: float = 0.0) -> tuple[Any, Run, Run]:
    import functools

    from flax import linen

    from attn_dispatch.integrations import flax as ours

    def make(**more: Any) -> Any:
        return linen.MultiHeadDotProductAttention(
            N, dropout_rate=rate, broadcast_dropout=False, **more
        )

    params = make().init(jax.random.key(0), X, deterministic=True)

    def run(layer: Any) -> Run:
        def call(params, x, mask=None, is_causal=False, key=None):
            if is_causal and layer.attention_fn is ours.attention_fn:
                causal = functools.partial(ours.attention_fn, is_causal=True)
                return run(layer.clone(attention_fn=causal))(params, x, mask, False, key)
            if is_causal:
                mask = CAUSAL if mask is None else mask & CAUSAL
            rngs = {} if key is None else {"dropout": key}
            return layer.apply(params, x, mask=mask, deterministic=key is None, rngs=rngs)

        return call

    return params, run(make()), run(make(attention_fn=ours.attention_fn))


def equinox(rate: float = 0.0) -> tuple[Any, Run, Run]:
    import equinox as eqx

    from attn_dispatch.integrations import equinox as ours

    original = eqx.nn.MultiheadAttention(N, D, dropout_p=rate, key=jax.random.key(0))
    params, rest = eqx.partition(original, eqx.is_array)
    arrays, replaced = eqx.partition(ours.replace_attention(original), eqx.is_array)

    def run(rest: Any, is_ours: bool) -> Run:
        def call(params, x, mask=None, is_causal=False, key=None):
            if is_ours:
                params = jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(params))
            layer = eqx.combine(params, rest)
            more = {"is_causal": True} if is_causal and is_ours else {}
            if is_causal and not is_ours:
                mask = CAUSAL if mask is None else mask & CAUSAL
            if mask is not None:
                mask = jnp.broadcast_to(mask, (B, N, T, T))
            keys = None if key is None else jax.random.split(key, B)

            def attend(x, mask, key):
                return layer(x, x, x, mask, key=key, inference=key is None, **more)

            axes = (0, None if mask is None else 0, None if keys is None else 0)
            return jax.vmap(attend, in_axes=axes)(x, mask, keys)

        return call

    return params, run(rest, False), run(replaced, True)


def haiku(rate: float = 0.0) -> tuple[Any, Run, Run]:
    import haiku as hk

    from attn_dispatch.integrations import haiku as ours

    def make(kind: Any) -> Any:
        def forward(x, mask, **more):
            init = hk.initializers.VarianceScaling(1.0)
            return kind(N, D // N, w_init=init)(x, x, x, mask, **more)

        return hk.without_apply_rng(hk.transform(forward))

    original, with_ours = make(hk.MultiHeadAttention), make(ours.MultiHeadAttention)
    params = original.init(jax.random.key(0), X, None)

    def run(layer: Any) -> Run:
        def call(params, x, mask=None, is_causal=False, key=None):
            if layer is original:
                if is_causal:
                    mask = CAUSAL if mask is None else mask & CAUSAL
                return layer.apply(params, x, mask)
            more = {} if key is None else {"dropout_rate": rate, "dropout_key": key}
            return layer.apply(params, x, mask, is_causal=is_causal, **more)

        return call

    return params, run(original), run(with_ours)


def keras(rate: float = 0.0, dtype: str = "float32") -> tuple[Any, Run, Run]:
    import keras

    from attn_dispatch.integrations.keras import patch_keras

    keras.utils.set_random_seed(0)
    layer = keras.layers.MultiHeadAttention(N, D // N, dropout=rate, dtype=dtype)
    layer.build(X.shape, X.shape)
    params = [x.value for x in layer.trainable_variables]
    rest = [x.value for x in layer.non_trainable_variables]

    def original(params, x, mask=None, is_causal=False, key=None):
        state = rest if key is None else [jax.random.key_data(key)]
        mask = None if mask is None else jnp.broadcast_to(mask[:, 0], (B, T, T))
        kwargs = {"attention_mask": mask, "use_causal_mask": is_causal}
        return layer.stateless_call(params, state, x, x, training=key is not None, **kwargs)[0]

    def with_ours(*args, **kwargs):
        with patch_keras():
            return original(*args, **kwargs)

    return params, original, with_ours


def penzai(rate: float = 0.0) -> tuple[Any, Run, Run]:
    from penzai import pz

    from attn_dispatch.integrations import penzai as ours

    def linear(name, inputs, outputs):
        return pz.nn.Linear.from_config(
            name, jax.random.key(0), input_axes=inputs, output_axes=outputs
        )

    heads, groups = {"heads": "h"}, {"groups": "g"}
    projected = {"heads": K, "projection": D // N}
    queries = {"seq": "t", **heads, **groups}
    out = {"heads": K, "groups": N // K, "projection": D // N}
    layer = pz.nn.Attention(
        input_to_query=linear("q", {"embedding": D}, out),
        input_to_key=linear("k", {"embedding": D}, projected),
        input_to_value=linear("v", {"embedding": D}, projected),
        query_key_to_attn=pz.nn.Sequential([
            pz.nn.NamedEinsum(
                ({**queries, "projection": "p"}, {"seq": "s", **heads, "projection": "p"}),
                {**queries, "kv_seq": "s"},
            ),
            pz.nn.ConstantRescale(by=jnp.float32((D // N) ** -0.5)),
            pz.nn.ApplyExplicitAttentionMask("mask", jnp.float32(-1e30)),
            pz.nn.Softmax("kv_seq"),
        ]),
        attn_value_to_output=pz.nn.Sequential([
            pz.nn.NamedEinsum(
                ({**queries, "kv_seq": "s"}, {"seq": "s", **heads, "projection": "p"}),
                {**queries, "projection": "p"},
            ),
            linear("out", out, {"embedding": D}),
        ]),
    )  # fmt: skip
    original, params = pz.unbind_params(layer, freeze=True)
    params = tuple(params)

    def run(layer: Any) -> Run:
        def call(params, x, mask=None, is_causal=False, key=None):
            mask = np.ones((1, 1, T, T), bool) if mask is None else mask
            mask = jnp.broadcast_to(mask & CAUSAL if is_causal else mask, (B, 1, T, T))[:, 0]
            bound = pz.bind_variables(layer, params)
            named = pz.nx.wrap(x).tag("batch", "seq", "embedding")
            masks = pz.nx.wrap(mask).tag("batch", "seq", "kv_seq")
            return bound(named, mask=masks).unwrap("batch", "seq", "embedding")

        return call

    return params, run(original), run(ours.replace_attention(original))


LAYERS = {
    "Flax NNX": Layer("flax", nnx),
    "Flax Linen": Layer("flax", linen),
    "Equinox": Layer("equinox", equinox),
    "Haiku": Layer("haiku", haiku),
    "Keras 3": Layer("keras", keras),
    "Penzai": Layer("penzai", penzai, has_dropout=False),
}
