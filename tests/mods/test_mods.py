"""score_mod and mask_mod on XLA: values, gradients and vmap."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods, ragged_dot_product_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.results_by_xla import MOD_GRADIENTS_BY_XLA
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.programs.tracing import trace
from attn_dispatch.xla import blocks
from tests.support.mod_arrays import KEY, OUT_GRAD, SLOPES, B, H, K, N, Q, S, T, V, gradients
from tests.support.option_parts import options_with, spec_with

TABLE = jnp.asarray(np.random.default_rng(1).standard_normal((N, 8)), jnp.float32)


PREFIX = jnp.array([3, 9])


def warped(score, b, n, t, s, slopes):
    return 2 * jnp.tanh(score / 2) - slopes[n] * jnp.log1p((t - s).astype(score.dtype)) * (b + 1)


def prefix(b, n, t, s, lengths):
    return (s <= t) | (s < lengths[b])


def indices() -> tuple[jax.Array, ...]:
    return tuple(jnp.ogrid[:B, :N, :T, :S])


def by_definition(q, k, v, score_of, mask) -> jax.Array:
    """Attention with all scores at once; score_of(scores, b, n, t, s)."""
    mask = jnp.broadcast_to(mask, (q.shape[0], N, T, S))
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(*q.shape[:2], K, N // K, H), k)
    scores = scores.reshape(-1, N, T, S) * H**-0.5
    b, n, t, s = indices()
    # Here NaN in masked pairs would reach the gradients.
    scores = score_of(scores, b, n, jnp.where(mask, t, 0), jnp.where(mask, s, 0))
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", p.reshape(-1, K, N // K, T, S), v)
    return out.reshape(q.shape)


def assert_same(got: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[2**27, 4000], ids=["one block", "many blocks"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(blocks, "SCORE_BYTES", request.param)
    monkeypatch.setattr(blocks, "ENOUGH_ROWS", 2)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("causality", ["is_causal", "mask_mod", "causal and lengths"])
def test_values_and_gradients_agree_with_the_definition(causality: str):
    """Gradients of query, key, value and an array; log1p gives NaN or infinity in masked pairs."""
    _, _, t, s = indices()
    mask = s <= t
    options: dict[str, Any] = {"is_causal": True}
    if causality == "mask_mod":
        options: dict[str, Any] = {"mask_mod": lambda b, n, t, s: s <= t}
    if causality == "causal and lengths":
        lengths = jnp.array([20, 7])
        options["key_value_seq_lengths"] = lengths
        mask = mask & (s < lengths[:, None, None, None])

    def ours(q, k, v, slopes):
        return dot_product_attention(q, k, v, score_mod=warped, score_mod_args=(slopes,), **options)

    def plain(q, k, v, slopes):
        return by_definition(q, k, v, lambda *x: warped(*x, slopes), mask)

    arrays = (Q, KEY, V, SLOPES)
    assert_same(jax.jit(ours)(*arrays), plain(*arrays))
    assert_same(gradients(ours, *arrays), gradients(plain, *arrays))


@pytest.mark.usefixtures("block_bytes")
def test_gradient_of_a_table():
    def mod(score, b, n, t, s, table):
        return score + table[n, jnp.clip(t - s + 4, 0, 7)]

    def ours(q, k, v, table):
        return dot_product_attention(q, k, v, score_mod=mod, score_mod_args=(table,))

    def plain(q, k, v, table):
        return by_definition(q, k, v, lambda *x: mod(*x, table), jnp.bool_(True))

    arrays = (Q, KEY, V, TABLE)
    assert_same(gradients(ours, *arrays), gradients(plain, *arrays))


def test_captured_array_has_the_gradient_of_a_given_one():
    def given(slopes):
        return dot_product_attention(
            Q, KEY, V, is_causal=True, score_mod=warped, score_mod_args=(slopes,)
        )

    def captured(slopes):
        mod = lambda score, b, n, t, s: warped(score, b, n, t, s, slopes)  # noqa: E731
        return dot_product_attention(Q, KEY, V, is_causal=True, score_mod=mod)

    assert_same(gradients(captured, SLOPES), gradients(given, SLOPES))


def test_jacobian_and_hessian_agree_with_the_definition():
    def ours(slopes):
        return dot_product_attention(
            Q, KEY, V, is_causal=True, score_mod=warped, score_mod_args=(slopes,)
        )

    def plain(slopes):
        _, _, t, s = indices()
        return by_definition(Q, KEY, V, lambda *x: warped(*x, slopes), s <= t)

    assert_same(jax.jit(jax.jacfwd(ours))(SLOPES), jax.jit(jax.jacfwd(plain))(SLOPES))
    loss = lambda call: lambda x: (call(x) * OUT_GRAD).sum()  # noqa: E731
    hessians = (jax.jit(jax.hessian(loss(call)))(SLOPES) for call in (ours, plain))
    assert_same(*hessians, tolerance=1e-4)


@pytest.mark.parametrize("mapped", ["q", "array", "both", "inner and outer"])
def test_vmap_agrees_with_single_calls(mapped: str):
    """b counts the batch rows of one call; each mapped call has a different array."""
    copies = jnp.arange(1.0, 4.0)[:, None]
    queries, slopes = jnp.stack([Q, 2 * Q, 3 * Q]), copies * SLOPES

    def call(q, slopes):
        return dot_product_attention(
            q, KEY, V, is_causal=True, score_mod=warped, score_mod_args=(slopes,),
            mask_mod=prefix, mask_mod_args=(PREFIX,),
        )  # fmt: skip

    def loss(q, slopes):
        return (call(q, slopes) * OUT_GRAD).sum()

    both = jax.value_and_grad(loss, (0, 1))
    if mapped == "q":
        got = jax.vmap(both, (0, None))(queries, SLOPES)
        expected = [both(q, SLOPES) for q in queries]
    elif mapped == "array":
        got = jax.vmap(both, (None, 0))(Q, slopes)
        expected = [both(Q, x) for x in slopes]
    elif mapped == "both":
        got = jax.vmap(both)(queries, slopes)
        expected = [both(*x) for x in zip(queries, slopes, strict=True)]
    else:
        got = jax.vmap(jax.vmap(both, (None, 0)), (0, None))(queries, slopes)
        expected = [[both(q, x) for x in slopes] for q in queries]
        expected = [jax.tree.map(lambda *x: jnp.stack(x), *row) for row in expected]
    assert_same(got, jax.tree.map(lambda *x: jnp.stack(x), *expected), tolerance=1e-4)


@pytest.mark.parametrize("mapped", [False, True])
def test_small_table_is_copied_for_each_key(mapped: bool, monkeypatch: pytest.MonkeyPatch):
    """The copies change no gradient; a large table is not copied."""
    tables = jnp.stack([TABLE, 2 * TABLE]) if mapped else TABLE

    def near(score, b, n, t, s, table):
        return score + table[n, jnp.clip(t - s, 0, 7)] * (b + 1)

    def loss(table):
        out = dot_product_attention(Q, KEY, V, score_mod=near, score_mod_args=(table,))
        return (out * OUT_GRAD).sum()

    def total(tables):
        return jax.vmap(loss)(tables).sum() if mapped else loss(tables)

    def gradient_and_text() -> tuple[jax.Array, str]:
        jax.clear_caches()
        lowered = jax.jit(jax.grad(total)).lower(tables)
        return lowered.compile()(tables), lowered.as_text()

    copies = f"{4 if mapped else ''}x{S}x{N}x8xf32".removeprefix("x")
    gradient, text = gradient_and_text()
    assert copies in text
    monkeypatch.setattr("attn_dispatch.semantics.mods._MAX_COPIED_ELEMENTS", S * N * 8 - 1)
    expected, text = gradient_and_text()
    assert copies not in text
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_positions_count_inside_segments_and_sequences():
    """With cu_seqlens, b is the number of the sequence."""
    lengths = (5, 9, 7)
    starts = np.cumsum([0, *lengths])
    shift = jnp.array([0.5, -1.0, 2.0])

    def mod(score, b, n, t, s):
        return score * (1 + t) / (1 + s)

    def with_sequence(score, b, n, t, s):
        return mod(score, b, n, t, s) + shift[b] * (t == s)

    q, k, v = Q[0], KEY[0, :T], V[0, :T]
    ids = jnp.repeat(jnp.arange(1, 4), jnp.array(lengths), total_repeat_length=T)
    segments = [
        dot_product_attention(
            q[None], k[None], v[None], score_mod=mod, query_segment_ids=ids[None],
            max_segments=limit,
        )[0]
        for limit in (None, 3)
    ]  # fmt: skip
    ragged = ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=9, max_seqlen_kv=9,
        score_mod=with_sequence,
    )  # fmt: skip
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        part = [x[None, first:last] for x in (q, k, v)]
        alone = dot_product_attention(*part, score_mod=mod)[0]
        for packed in segments:
            assert_same(packed[first:last], alone)
        numbered = lambda *x, i=i: with_sequence(x[0], i, *x[2:])  # noqa: E731
        assert_same(ragged[first:last], dot_product_attention(*part, score_mod=numbered)[0])


def test_decoding_query_with_a_score_mod():
    mod = lambda score, b, n, t, s: score - SLOPES[n] * s  # noqa: E731
    got = dot_product_attention(Q[:, :1], KEY, V, score_mod=mod)
    _, n, _, s = indices()
    bias = jnp.broadcast_to(-SLOPES[n] * s, (1, N, 1, S))
    assert_same(got, dot_product_attention(Q[:, :1], KEY, V, bias=bias))


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_a_mask_may_be_drawn(key):
    def is_kept(s: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key(3), s), 0.6)

    mask = jax.vmap(is_kept)(jnp.arange(S))[None, None, None]
    got = dot_product_attention(Q, KEY, V, mask_mod=lambda b, n, t, s: is_kept(s))
    assert 0 < mask.sum() < S
    assert_same(got, dot_product_attention(Q, KEY, V, mask=mask))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_gradients_in_other_dtypes(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        q, k, v = (x.astype(dtype) for x in (Q, KEY, V))

        def call(q):
            out = dot_product_attention(q, k, v, score_mod=warped, score_mod_args=(SLOPES,),
                                        is_causal=True)  # fmt: skip
            return (out.astype(jnp.float32) * OUT_GRAD).sum()

        grad = jax.grad(call)(q)
    assert grad.dtype == dtype
    exact = gradients(
        lambda q: dot_product_attention(
            q, KEY, V, score_mod=warped, score_mod_args=(SLOPES,), is_causal=True
        ),
        Q,
    )
    assert_same(grad.astype(jnp.float32), exact[0], tolerance=5e-2)


@pytest.mark.parametrize("gradients", [("query", "score_mod_0"), ("score_mod_0",)])
def test_xla_computes_the_gradients_of_arrays_beside_a_kernel(gradients: tuple[str, ...]):
    program = trace("score_mod", warped, (SLOPES,), "float32").program
    names = ("query", "key", "value", "score_mod_0", "mods_start", "out", "lse", "out_grad")
    options = options_with(
        operands=names, scale=1.0, score_mod=program, gradients=gradients, needs_lse=True
    )
    shapes = {
        "query": Q.shape, "key": KEY.shape, "value": V.shape, "score_mod_0": (1, N),
        "mods_start": (1, 2), "out": Q.shape, "lse": (B, N, T), "out_grad": Q.shape,
    }  # fmt: skip
    avals = [jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in names]
    spec = AttentionSpec.of(avals, options)

    def fake(source: str):
        return lambda spec, operands: {x: source for x in spec.wanted.gradients}

    inner = MOD_GRADIENTS_BY_XLA.inner(spec)
    calls: Any = Calls(partial(fake("kernel"), inner), fake("xla"), fake("kernel"))
    found: Any = MOD_GRADIENTS_BY_XLA.compute(spec, inner, {}, calls)
    assert found["score_mod_0"] == "xla"
    assert "query" not in gradients or found["query"] == "kernel"
    with_dropout = spec_with(spec, dropout_rate=0.5)
    assert MOD_GRADIENTS_BY_XLA.applied(with_dropout) is None


def test_gradients_of_16_bit_tables_are_summed_in_float32():
    """A float32 table with the same numbers gets no more exact gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, out_grad = (jax.random.normal(key, (1, 512, 2, 16)) for key in keys)
    table = jnp.sin(jnp.arange(64.0)).reshape(32, 2).astype(jnp.bfloat16).astype(jnp.float32)

    def gradient(table: Any, dtype: Any) -> np.ndarray:
        def loss(table: Any) -> Any:
            given = (x.astype(dtype) for x in (q, k, v))
            out = dot_product_attention(*given, score_mod=mods.relative_position(table))
            return (out.astype(jnp.float32) * out_grad).sum()

        return np.asarray(jax.jit(jax.grad(loss))(table), np.float64)

    exact = gradient(table, jnp.float32)
    narrow, wide = (
        np.abs(gradient(table.astype(x), jnp.bfloat16) - exact).max()
        for x in (jnp.bfloat16, jnp.float32)
    )
    assert narrow <= 1.5 * wide
