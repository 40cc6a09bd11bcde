"""Details of our layers for Equinox, Haiku and Penzai."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import AttentionConventionWarning, dot_product_attention

_rng = np.random.default_rng(3)
T, D, N = 6, 16, 4
X = _rng.standard_normal((T, D)).astype(np.float32)


def test_equinox_layers_have_equinox_parameters():
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import MultiheadAttention

    options: dict[str, Any] = {
        "key_size": 8,
        "value_size": 12,
        "output_size": 20,
        "use_query_bias": True,
    }
    original = eqx.nn.MultiheadAttention(N, D, key=jax.random.key(0), **options)
    ours = MultiheadAttention(N, D, key=jax.random.key(0), **options)
    for a, b in zip(*map(jax.tree.leaves, (original, ours)), strict=True):
        np.testing.assert_array_equal(a, b)
    mask = (_rng.random((T, 9)) < 0.6) | (np.arange(9) == 0)
    y = _rng.standard_normal((9, 20)).astype(np.float32)
    for m in (None, mask, np.stack([mask, ~mask | mask[::-1], mask[::-1], mask])):
        given = (X, y[:, :8], y[:, 8:], m)
        np.testing.assert_allclose(ours(*given), original(*given), atol=2e-6)


def test_equinox_layers_take_fewer_kv_heads():
    pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import MultiheadAttention

    layer = MultiheadAttention(N, D, num_kv_heads=2, key=jax.random.key(0))
    assert layer.key_proj.weight.shape == layer.value_proj.weight.shape == (2 * D // N, D)
    heads = (layer.query_proj, layer.key_proj, layer.value_proj)
    q, k, v = ((X @ x.weight.T).reshape(T, -1, D // N) for x in heads)
    expected = dot_product_attention(q, k, v, is_causal=True).reshape(T, D)
    got = layer(X, X, X, is_causal=True)
    np.testing.assert_allclose(got, expected @ layer.output_proj.weight.T, atol=2e-6)
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of 4, got 3"):
        MultiheadAttention(N, D, num_kv_heads=3, key=jax.random.key(0))


def test_equinox_layers_of_a_model_keep_its_options():
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import replace_attention

    model = [eqx.nn.MultiheadAttention(N, D, key=jax.random.key(0))]
    (ours,) = replace_attention(model, is_causal=True, local_window_size=(2, 0))
    near = np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool)
    expected = model[0](X, X, X, near)
    for call in (ours, eqx.filter_jit(ours)):
        np.testing.assert_allclose(call(X, X, X), expected, atol=2e-6)
    np.testing.assert_array_equal(ours(X, X, X, is_causal=True), ours(X, X, X))
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(model))
    with pytest.raises(ValueError, match=r"local_window_size: expected \(2, 0\), as replace_att"):
        ours(X, X, X, local_window_size=(3, 0))
    with pytest.raises(ValueError, match=r"is_causal: expected True, .*, got False"):
        ours(X, X, X, is_causal=False)
    with pytest.raises(ValueError, match="sinks: expected no array, got float32"):
        replace_attention(model, sinks=np.zeros(N, np.float32))


def test_equinox_layers_that_stay_beside_replaced_ones_are_named():
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import MultiheadAttention, replace_attention

    class Own(eqx.nn.MultiheadAttention):
        pass

    class SelfAttention(eqx.Module):
        inner: Any

    class LinearAttention(SelfAttention):
        pass

    layer, own, ours = (
        kind(N, D, key=jax.random.key(0))
        for kind in (eqx.nn.MultiheadAttention, Own, MultiheadAttention)
    )
    linear = eqx.nn.Linear(D, D, key=jax.random.key(0))
    model = {"layers": [layer, own, ours], "last": SelfAttention(linear)}
    with pytest.warns(AttentionConventionWarning) as given:
        out = replace_attention(model, is_causal=True)
    assert [str(x.message) for x in given] == [
        "replace_attention: these layers stay as they are, without is_causal=True: last: "
        "SelfAttention; layers/1: Own; layers/2: MultiheadAttention of attn_dispatch already. Use "
        "MultiheadAttention of attn_dispatch.integrations.equinox in place of a layer, or call "
        "attn_dispatch.dot_product_attention in it"
    ]
    assert given[0].filename == __file__
    assert type(out["layers"][0]) is MultiheadAttention and type(out["layers"][1]) is Own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = replace_attention([SelfAttention(layer), LinearAttention(linear), linear, ours])
        replace_attention([layer, replace_attention(layer, is_causal=True)], is_causal=True)
    with pytest.raises(ValueError, match="found 0/inner: MultiheadAttention of attn_dispatch alr"):
        replace_attention(whole)


def test_equinox_dropout_and_process_heads_agree_with_equinox():
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import MultiheadAttention, replace_attention

    layer = MultiheadAttention(N, D, dropout_p=0.5, key=jax.random.key(0))
    with pytest.raises(RuntimeError, match="expected a key for dropout"):
        layer(X, X, X)
    quiet = layer(X, X, X, inference=True)
    np.testing.assert_array_equal(eqx.nn.inference_mode(layer)(X, X, X), quiet)
    assert abs(layer(X, X, X, key=jax.random.key(1)) - quiet).max() > 0.01
    original = eqx.nn.MultiheadAttention(N, D, dropout_p=0.5, key=jax.random.key(0))
    rope = eqx.nn.RotaryPositionalEmbedding(D // N)

    def turned(q, k, v):
        return jax.vmap(rope, 1, 1)(q), jax.vmap(rope, 1, 1)(k), v

    options: Any = {"inference": True, "process_heads": turned}
    np.testing.assert_allclose(layer(X, X, X, **options), original(X, X, X, **options), atol=2e-6)
    with pytest.raises(ValueError, match="process_heads: expected heads of the shapes"):
        layer(X, X, X, inference=True, process_heads=lambda q, k, v: (q[:2], k, v))

    class Own(eqx.nn.MultiheadAttention):
        pass

    message = (
        r"a model with eqx\.nn\.MultiheadAttention in it, got none; found a: Own; b: Multihead"
    )
    with pytest.raises(ValueError, match=message):
        replace_attention({"a": Own(N, D, key=jax.random.key(0)), "b": layer})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, TypeError, "'causal': here it is is_causal"),
        ({"local_window_size": "x"}, ValueError, "local_window_size: expected a non-negative int"),
        ({"logits_soft_cap": -1}, ValueError, "logits_soft_cap: expected a positive number"),
        ({"is_causal": 1}, ValueError, "is_causal: expected True or False, got 1"),
        ({"query": X}, ValueError, "query: expected it in each call of the layer"),
        ({"mask": None}, ValueError, r"mask: .*, got it in replace_attention\(…\)"),
    ],
)
def test_equinox_refuses_wrong_options_before_any_call(options: Any, error: Any, message: str):
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import replace_attention

    with pytest.raises(error, match=message):
        replace_attention([eqx.nn.MultiheadAttention(N, D, key=jax.random.key(0))], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 0.1}, "dropout_rate: expected the layer's dropout_p instead, got"),
        ({"dropout_key": None}, "dropout_key: expected key instead"),
        ({"return_lse": True}, "return_lse: expected no further results in a layer"),
        ({"qkv_layout": "BNTH"}, "qkv_layout: expected 'BTNH', the order of axes in which the"),
    ],
)
def test_equinox_refuses_options_that_a_layer_cannot_use(options: Any, message: str):
    pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import MultiheadAttention

    layer = MultiheadAttention(N, D, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        layer(X, X, X, **options)
    assert layer(X, X, X, return_lse=False).shape == (T, D)
    with pytest.raises(ValueError, match=r"key_: expected \[length, size\], got \[1, 6, 16\]"):
        layer(X, X[None], X)


def test_haiku_masks_agree_with_haiku():
    hk = pytest.importorskip("haiku")
    from attn_dispatch.integrations.haiku import MultiHeadAttention

    def run(kind: Any, mask: Any) -> Any:
        def forward(x):
            init = hk.initializers.VarianceScaling(1.0)
            return kind(N, 8, value_size=4, model_size=5, w_init=init, with_bias=False)(
                x, x, x, mask
            )

        model = hk.without_apply_rng(hk.transform(forward))
        return model.apply(model.init(jax.random.key(0), X), X)

    mask = np.tril(np.ones((1, T, T)))  # numbers, without a batch dim
    np.testing.assert_allclose(
        run(MultiHeadAttention, mask), run(hk.MultiHeadAttention, mask), atol=2e-6
    )
    with pytest.raises(ValueError, match="mask: expected 3 dims"):
        run(MultiHeadAttention, mask[0])


def test_penzai_transformers_agree_with_penzai(record_property: Any):
    """The test runs whole models, causal by positions, and decodes with their caches."""
    pytest.importorskip("penzai")
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama

    from attn_dispatch.integrations.penzai import replace_attention

    window = llama.AttentionTypeSlidingWindowCausal(3)
    for groups, kv_heads, cap, kind in (
        (1, 4, None, llama.AttentionTypeGlobalCausal()),
        (2, 2, 0.5, window),
        (4, 1, None, window),
    ):
        config = llama.LlamalikeTransformerConfig(
            num_kv_heads=kv_heads, query_head_multiplier=groups, embedding_dim=D, projection_dim=8,
            mlp_hidden_dim=D, num_decoder_blocks=2, vocab_size=11, mlp_variant="swiglu",
            tie_embedder_and_logits=False, rope_wavelength=1e4, attn_logits_soft_cap=cap,
            attention_type=kind, parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
        )  # fmt: skip
        original = llama.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
        ours = replace_attention(original)
        tokens = pz.nx.wrap(_rng.integers(0, 11, (2, T))).tag("batch", "seq")
        positions = pz.nx.arange("seq", T)
        names = ("batch", "seq", "vocabulary")
        got, expected = (
            pz.nn.Sequential([x])(tokens, token_positions=positions).unwrap(*names)
            for x in (ours, original)
        )
        np.testing.assert_allclose(got, expected, atol=1e-5)
        assert ours.body.sublayers != original.body.sublayers  # pyright: ignore[reportAttributeAccessIssue]
        assert jax.tree.structure(replace_attention(ours)) == jax.tree.structure(ours)

        steps = []
        for model in (original, ours, None):
            cached = pz.select(original if model is None else model).at_instances_of(
                pz.nn.Attention
            )
            shared = {} if kv_heads == 1 else {"heads" if groups == 1 else "head_groups": kv_heads}

            def with_cache(x, sizes=shared | {"batch": 2, "projection": 8}):
                return pz.nn.KVCachingAttention.from_uncached(
                    x, "seq", T, sizes, cache_end_index_key="end"
                )

            cached = cached.apply(with_cache)
            if model is None:  # our layers replace layers that have caches already
                cached = replace_attention(cached)
            free, variables = pz.unbind_variables(cached)
            frozen = tuple(x.freeze() for x in variables)
            outs = []
            for i in range(T):
                # Keys that are not written yet have position -1.
                positions = jnp.where(jnp.arange(T) <= i, jnp.arange(T), -1)
                bound = [x.unfreeze_as_copy() for x in frozen]
                out = _with_kv_positions(pz, pz.bind_variables(free, bound))(
                    tokens[{"seq": pz.slice[i : i + 1]}],
                    token_positions=pz.nx.wrap(jnp.array([i])).tag("seq"),
                    kv_token_positions=pz.nx.wrap(positions).tag("seq"),
                    end=jnp.int32(i),
                )
                frozen = tuple(x.freeze() for x in bound)
                outs.append(out.unwrap(*names))
            steps.append(np.concatenate(outs, 1))
        np.testing.assert_allclose(steps[0], expected, atol=1e-5)
        np.testing.assert_allclose(steps[1], expected, atol=1e-5)
        np.testing.assert_allclose(steps[2], expected, atol=1e-5)
    record_property("cell", ("Penzai", "decode", "the same"))


def _with_kv_positions(pz: Any, model: Any) -> Any:
    kinds = (pz.nn.ApplyCausalAttentionMask, pz.nn.ApplyCausalSlidingWindowAttentionMask)
    return pz.select(model).at_instances_of(kinds).apply(
        lambda x: dataclasses.replace(x, kv_positions_input_name="kv_token_positions")
    )  # fmt: skip


def test_haiku_refuses_another_order_of_axes():
    hk = pytest.importorskip("haiku")
    from attn_dispatch.integrations.haiku import MultiHeadAttention

    w = hk.initializers.VarianceScaling(1.0)
    layer = hk.transform(lambda x: MultiHeadAttention(N, 4, w_init=w)(x, x, x, qkv_layout="BNTH"))
    with pytest.raises(ValueError, match="qkv_layout: expected 'BTNH'"):
        layer.init(jax.random.key(0), X)


def test_haiku_refuses_further_results():
    hk = pytest.importorskip("haiku")
    from attn_dispatch.integrations.haiku import MultiHeadAttention

    w = hk.initializers.VarianceScaling(1.0)
    layer = hk.transform(lambda x: MultiHeadAttention(N, 4, w_init=w)(x, x, x, return_lse=True))
    with pytest.raises(ValueError, match="return_lse: expected no further results in a layer"):
        layer.init(jax.random.key(0), X)


def test_penzai_refuses_models_without_known_attention():
    pytest.importorskip("penzai")
    from penzai import pz

    from attn_dispatch.integrations.penzai import replace_attention

    with pytest.raises(
        ValueError, match=r"expected a model with pz\.nn\.Attention in it, got none"
    ):
        replace_attention(pz.nn.Identity())
    identity = pz.nn.Identity()
    layer = pz.nn.Attention(identity, identity, identity, identity, identity)
    with pytest.raises(ValueError, match="replace_attention: expected"):
        replace_attention(layer)
