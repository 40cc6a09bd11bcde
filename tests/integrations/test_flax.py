"""Flax's arguments to attention_fn: masks, dtypes, dropout, sow, decoding."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen, nnx

from attn_dispatch import AttentionConventionWarning, dot_product_attention, explain, mods
from attn_dispatch.integrations.flax import attention_fn

# Flax has is_causal since 0.12.8, and groups in a later version.
HAS_GROUPS = "num_kv_heads" in inspect.signature(nnx.MultiHeadAttention).parameters
HAS_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters

B, T, S, N, H = 2, 5, 7, 4, 8
_rng = np.random.default_rng(3)
Q, K, V = (_rng.standard_normal((B, x, N, H)).astype(np.float32) for x in (T, S, S))
PAIRS = (_rng.random((B, N, T, S)) < 0.6) | (np.arange(S) == 0)
BOTH = pytest.mark.parametrize("theirs", [linen.dot_product_attention, nnx.dot_product_attention])


def with_warnings(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = call()
    # Flax warns about its coming changes.
    given = [x for x in given if x.category is AttentionConventionWarning]
    assert all(x.filename == __file__ for x in given)
    return result, [str(x.message) for x in given]


@BOTH
@pytest.mark.parametrize(
    "mask",
    [PAIRS, PAIRS.astype(np.float32), PAIRS.astype(np.int32), PAIRS[:, :1], PAIRS[:, :1, :1],
     PAIRS[:1], PAIRS[0, 0][None, None]],
)  # fmt: skip
@pytest.mark.parametrize("bias", [None, _rng.standard_normal((B, N, T, S)).astype(np.float32)])
def test_masks_and_biases_agree_with_flax(theirs: Any, mask: np.ndarray, bias: Any):
    # NNX passes a mask to jax.nn only as bools.
    expected = theirs(Q, K, V, bias, mask)
    got, messages = with_warnings(lambda: attention_fn(Q, K, V, bias, mask))
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert messages == []


@BOTH
def test_several_batch_dims_agree_with_flax(theirs: Any):
    q, k, v = (np.stack([x, -x], 1) for x in (Q, K, V))
    mask = np.stack([PAIRS, PAIRS[::-1]], 1)
    np.testing.assert_allclose(
        attention_fn(q, k, v, mask=mask), theirs(q, k, v, mask=mask), atol=2e-6
    )


@BOTH
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("given", [(jnp.bfloat16, jnp.float32), (jnp.bfloat16,) * 2])
def test_dtypes_agree_with_flax(theirs: Any, dtype: Any, given: tuple[Any, Any]):
    q, k, v = jnp.asarray(Q, given[0]), jnp.asarray(K, given[1]), jnp.asarray(V, given[0])
    got, expected = (f(q, k, v, dtype=dtype) for f in (attention_fn, theirs))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32),
        expected.astype(jnp.float32),
        atol=4e-2 if got.dtype == jnp.bfloat16 else 2e-6,
    )


def test_force_fp32_for_softmax_gives_float32():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V)]
    got, expected = (
        f(*arrays, force_fp32_for_softmax=True) for f in (attention_fn, linen.dot_product_attention)
    )
    assert got.dtype == expected.dtype == jnp.float32


def test_arguments_without_a_counterpart_warn_once():
    key = jax.random.key(0)
    call = functools.partial(attention_fn, Q, K, V, dropout_rng=key, dropout_rate=0.5)

    def twice(**arguments: Any) -> list[str]:
        return with_warnings(lambda: [call(**arguments) for _ in range(2)])[1]

    (message,) = twice()
    assert message.startswith(
        "broadcast_dropout: each pair of query and key is dropped independently"
    )
    assert twice(broadcast_dropout=False) == []
    assert twice(deterministic=True) == []
    (message,) = twice(deterministic=True, precision="highest")
    assert message.startswith("precision: no counterpart for highest")
    assert twice(deterministic=True, precision=(None, jax.lax.Precision.DEFAULT)) == []


def test_deterministic_switches_dropout_off():
    given: dict[str, Any] = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
    got = attention_fn(Q, K, V, deterministic=True, **given)
    np.testing.assert_array_equal(got, attention_fn(Q, K, V))
    with pytest.raises(ValueError, match="dropout_key"):
        attention_fn(Q, K, V, dropout_rate=0.5, broadcast_dropout=False)


def test_our_options_can_be_given_by_partial():
    near = functools.partial(attention_fn, local_window_size=(1, 0))
    layer = nnx.MultiHeadAttention(N, 16, decode=False, rngs=nnx.Rngs(0), attention_fn=near)
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    is_near = np.tril(np.ones((T, T), bool)) & ~np.tril(np.ones((T, T), bool), -2)
    original = nnx.MultiHeadAttention(N, 16, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(x), original(x, mask=is_near[None, None]), atol=2e-6)
    with pytest.raises(TypeError, match="window_size"):
        functools.partial(attention_fn, window_size=(1, 0))(Q, K, V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_key": None}, "dropout_key: expected dropout_rng, Flax's name for it, instead"),
        ({"return_lse": True}, "return_lse: expected no further results in a layer"),
        ({"return_residual": True}, "return_residual: expected no further results in a layer"),
        ({"qkv_layout": "BNTH"}, "qkv_layout: expected 'BTNH', the order of axes in which the"),
    ],
)
def test_options_that_a_layer_cannot_use_are_refused(options: Any, message: str):
    layer = linen.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=functools.partial(attention_fn, **options)
    )
    with pytest.raises(ValueError, match=message):
        layer.init(jax.random.key(0), jnp.ones((1, 4, 8)))


def test_nnx_keeps_weights_with_its_attention_and_warns(record_property: Any):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    found = []
    for more in ({}, {"attention_fn": attention_fn}):
        layer = nnx.MultiHeadAttention(N, 16, decode=False, rngs=nnx.Rngs(0), **more)
        out, messages = with_warnings(lambda layer=layer: layer(x, sow_weights=True))
        weights = jax.tree.leaves(nnx.pop(layer, nnx.Intermediate))
        found.append((out, *weights))
    assert [m.split(":")[0] for m in messages] == ["sow_weights"]
    for got, expected in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)
    assert found[0][1].shape == (B, N, T, T)
    causal: dict[str, Any] = {"is_causal": True} if HAS_CAUSAL else {"mask": np.tri(T, dtype=bool)}
    out, _ = with_warnings(lambda: layer(x, sow_weights=True, **causal))
    weights = jax.tree.leaves(nnx.pop(layer, nnx.Intermediate))[0]
    np.testing.assert_array_equal(np.triu(np.asarray(weights), 1), 0)
    np.testing.assert_allclose(out, layer(x, **causal), atol=2e-6)
    with pytest.raises(ValueError, match="sow_weights: expected no options of attn_dispatch"):
        attention_fn(Q, K, V, module=layer, logits_soft_cap=3.0)
    record_property("cell", ("Flax NNX", "sow", "Flax's attention computes it, with a warning"))


def test_linen_keeps_weights_with_its_attention_and_warns(record_property: Any):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    mask = np.tril(np.ones((T, T), np.float32))[None, None]
    found = []
    for more in ({}, {"attention_fn": attention_fn}):
        layer = linen.MultiHeadDotProductAttention(N, **more)
        params = layer.init(jax.random.key(0), x)
        run = functools.partial(layer.apply, params, x, mask=mask, mutable=["intermediates"])
        found.append(with_warnings(lambda run=run: run(sow_weights=True)))
    assert found[0][1] == []
    assert [m.split(":")[0] for m in found[1][1]] == ["sow_weights"]
    for got, expected in zip(*(jax.tree.leaves(x) for x, _ in found), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)
    record_property("cell", ("Flax Linen", "sow", "Flax's attention computes it, with a warning"))


def test_another_einsum_runs_with_linens_attention():
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    einsums: dict[str, Any] = {
        "qk_attn_weights_einsum_cls": lambda: lambda *a: 2 * jnp.einsum(*a),
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    original = linen.MultiHeadDotProductAttention(N, **einsums)
    params = original.init(jax.random.key(0), x)
    ours = original.clone(attention_fn=attention_fn)
    got, messages = with_warnings(lambda: ours.apply(params, x))
    np.testing.assert_allclose(got, original.apply(params, x), atol=2e-6)
    assert [m.split(":")[0] for m in messages] == ["another einsum"]


def test_decoding_with_nnx_agrees_with_flax(record_property: Any):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    outs = []
    groups = {"num_kv_heads": 2} if HAS_GROUPS else {}
    for more in (groups, groups | {"attention_fn": attention_fn}):
        layer = nnx.MultiHeadAttention(N, 16, decode=True, rngs=nnx.Rngs(0), **more)
        layer.init_cache(x.shape)
        outs.append([layer(x[:, i : i + 1]) for i in range(T)])
    np.testing.assert_allclose(np.stack(outs[1]), np.stack(outs[0]), atol=2e-6)
    record_property("cell", ("Flax NNX", "decode", "the same"))


def test_decoding_with_linen_agrees_with_flax(record_property: Any):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    outs = []
    for more in ({}, {"attention_fn": attention_fn}):
        layer = linen.MultiHeadDotProductAttention(N, decode=True, **more)
        variables = layer.init(jax.random.key(0), x)
        cache = variables["cache"]
        steps = []
        for i in range(T):
            given = {"params": variables["params"], "cache": cache}
            out, state = layer.apply(given, x[:, i : i + 1], mutable=["cache"])
            cache = state["cache"]
            steps.append(out)
        outs.append(steps)
    np.testing.assert_allclose(np.stack(outs[1]), np.stack(outs[0]), atol=2e-6)
    record_property("cell", ("Flax Linen", "decode", "the same"))


@pytest.mark.skipif(not HAS_CAUSAL, reason="needs Flax 0.12.8")
def test_a_causal_step_of_decoding_warns():
    """Flax 0.12.8 passes is_causal for a single query, whose top-left causal mask has only key 0.

    Its attention then sees only the first token. Flax 0.12.12 does not pass it.
    """
    x = _rng.standard_normal((B, 2, 16)).astype(np.float32)

    def second_step(**options: Any) -> Any:
        layer = nnx.MultiHeadAttention(N, 16, decode=True, rngs=nnx.Rngs(0), **options)
        layer.init_cache((B, T, 16))
        layer(x[:, :1])
        return lambda **causal: layer(x[:, 1:], **causal)

    hands_it_on = not np.allclose(second_step()(is_causal=True), second_step()())
    _, messages = with_warnings(lambda: second_step(attention_fn=attention_fn)(is_causal=True))
    expected = ["is_causal=True with one query and several keys"] * hands_it_on
    assert [m.split(":")[0] for m in messages] == expected


def steps_of(kind: str, x: np.ndarray, masks: list[Any], function: Any) -> np.ndarray:
    """The outputs of decoding steps with a cache, each with its mask."""
    outs = []
    if kind == "NNX":
        layer = nnx.MultiHeadAttention(N, 16, decode=True, rngs=nnx.Rngs(0), attention_fn=function)
        layer.init_cache(x.shape)
        outs = [layer(x[:, i : i + 1], mask=mask) for i, mask in enumerate(masks)]
    else:
        layer = linen.MultiHeadDotProductAttention(N, decode=True, attention_fn=function)
        whole = linen.MultiHeadDotProductAttention(N, decode=True)
        variables = whole.init(jax.random.key(0), x)
        params, cache = variables["params"], variables["cache"]
        for i, mask in enumerate(masks):
            given = {"params": params, "cache": cache}
            out, state = layer.apply(given, x[:, i : i + 1], mask=mask, mutable=["cache"])
            cache = state["cache"]
            outs.append(out)
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize("kind", ["NNX", "Linen"])
@pytest.mark.parametrize(
    "options", [{"local_window_size": (1, 0)}, {"alibi_slopes": np.linspace(0.1, 2.0, N)}]
)
def test_options_by_query_position_need_bottom_right_in_decoding(
    kind: str, options: dict[str, Any]
):
    """Flax does not pass the position. With it, decoding steps equal the rows of a whole call."""
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    masks = [None] * T
    (name,) = options
    options = {name: jnp.asarray(x) if name == "alibi_slopes" else x for name, x in options.items()}
    for more in ({}, {"causal_alignment": "bottom_right"}):
        with pytest.raises(ValueError, match=f'{name}: expected causal_alignment="bottom_right"'):
            steps_of(kind, x, masks, functools.partial(attention_fn, **options, **more))
    step = iter(range(1, T + 1))

    def placed(*args: Any, **kwargs: Any) -> Any:
        ends: dict[str, Any] = {"key_value_seq_lengths": np.full(B, next(step))}
        return attention_fn(*args, **kwargs, **options, **ends, causal_alignment="bottom_right")

    whole, causal = functools.partial(attention_fn, **options), np.tri(T, dtype=bool)
    if kind == "NNX":
        layer = nnx.MultiHeadAttention(N, 16, decode=False, rngs=nnx.Rngs(0), attention_fn=whole)
        expected = layer(x, mask=causal)
    else:
        layer = linen.MultiHeadDotProductAttention(N, attention_fn=whole)
        expected = layer.apply(layer.init(jax.random.key(0), x), x, mask=causal)
    np.testing.assert_allclose(steps_of(kind, x, masks, placed), expected, atol=2e-6)
    if name == "local_window_size":
        window = [(np.arange(T) >= i - 1)[None, None, None] for i in range(T)]
        got, messages = with_warnings(lambda: steps_of(kind, x, window, attention_fn))
        np.testing.assert_allclose(got, expected, atol=2e-6)
        assert messages == []


def test_a_mod_that_reads_the_query_position_warns_in_decoding():
    near = functools.partial(attention_fn, mask_mod=lambda b, n, t, s: s >= t - 1)
    _, messages = with_warnings(lambda: near(Q[:, :1], K, V))
    assert [m.split(",")[0] for m in messages] == [
        "mask_mod: the one query of a decoding step has t = 0"
    ]
    _, messages = with_warnings(lambda: near(Q[:, :1], K[:, :1], V[:, :1]))
    assert messages == []
    moved = functools.partial(
        attention_fn, mask_mod=mods.with_query_offset(lambda b, n, t, s: s >= t - 1, 4)
    )
    assert with_warnings(lambda: moved(Q[:, :1], K, V))[1] == []
    capped = functools.partial(attention_fn, score_mod=mods.soft_cap(3.0))
    assert with_warnings(lambda: capped(Q[:, :1], K, V))[1] == []


def test_one_query_without_a_cache_does_not_warn():
    """The position of the query is given, or has no effect."""
    query, mask = Q[:, :1], np.ones((B, 1, 1, S), bool)
    for options in (
        {"local_window_size": (None, None)},
        {"local_window_size": (2, 0), "causal_alignment": "bottom_right"},
        {"local_window_size": (0, 2), "causal_alignment": "top_left"},
    ):
        got = with_warnings(lambda options=options: attention_fn(query, K, V, **options))[0]
        expected = with_warnings(
            lambda options=options: dot_product_attention(query, K, V, **options)
        )[0]
        np.testing.assert_array_equal(got, expected)
    ids: dict[str, Any] = {
        "query_segment_ids": np.ones((B, 1), int),
        "key_value_segment_ids": np.ones((B, S), int),
    }
    near: dict[str, Any] = {"local_window_size": (2, 0), "causal_alignment": "bottom_right"}
    got, messages = with_warnings(lambda: attention_fn(query, K, V, mask=mask, **near, **ids))
    np.testing.assert_allclose(got, dot_product_attention(query, K, V, **near), atol=2e-6)
    assert messages == []


def test_one_query_with_a_symbolic_number_of_keys():
    (keys,) = jax.export.symbolic_shape("s")
    query = jax.ShapeDtypeStruct((B, 1, N, H), jnp.float32)
    key = jax.ShapeDtypeStruct((B, keys, N, H), jnp.float32)
    exported = jax.export.export(jax.jit(attention_fn))(query, key, key)
    got = exported.call(Q[:, :1], K, V)
    np.testing.assert_allclose(got, attention_fn(Q[:, :1], K, V), atol=2e-6)


def test_a_mod_gets_scores_in_the_dtype_of_the_operands():
    with jax.enable_x64(True):
        query, key = (jnp.asarray(x, jnp.float64) for x in (Q[:, :1], K))
        exact = functools.partial(
            attention_fn, score_mod=lambda x, b, n, t, s: jax.lax.add(x, jnp.float64(1))
        )
        assert exact(query, key, key).dtype == jnp.float64


@pytest.mark.parametrize("given", ["mask", "bias"])
def test_attention_fn_takes_the_place_of_weights_and_an_einsum(given: str):
    """As docs/integrations.md says of Transformers' models, with the masks that they make."""
    mask = (PAIRS & (np.arange(S) < 5)).astype(np.float32)
    bias = np.where(mask > 0, 0.0, np.finfo(np.float32).min).astype(np.float32)
    more = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1, "broadcast_dropout": True,
            "deterministic": True, "dtype": jnp.float32, "precision": None}  # fmt: skip

    def before(q: Any, k: Any, v: Any) -> jax.Array:
        weights = linen.dot_product_attention_weights(q, k, bias=bias, **more)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v)

    def after(q: Any, k: Any, v: Any) -> jax.Array:
        seen = {"bias": bias} if given == "bias" else {"mask": mask > 0}
        return attention_fn(q, k, v, **seen, **more)

    out_grad = np.cos(np.arange(B * T * N * H, dtype=np.float32)).reshape(B, T, N, H)
    for x, y in zip(*(of_call(f, out_grad) for f in (before, after)), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6)
    struct = jax.ShapeDtypeStruct((2, 128, N, 64), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((2, 1, 1, 128), bool if given == "mask" else jnp.bfloat16)
    options: Any = {given: hidden}
    for target, kernel in (("h100", ("cudnn", "unknown")), ("mi300x", ("aiter",))):
        found = explain(struct, struct, struct, **options, target=target)
        assert found.chosen_forward in kernel and found.chosen_backward in kernel


def of_call(call: Callable[..., jax.Array], out_grad: np.ndarray) -> list[jax.Array]:
    """The output and the gradients of query, key and value."""
    out, vjp = jax.vjp(call, Q, K, V)
    return [out, *vjp(out_grad)]
