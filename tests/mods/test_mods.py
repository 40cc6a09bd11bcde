"""score_mod and mask_mod on XLA: values, gradients, transformations, and what is refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, mods, ragged_dot_product_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.results_by_xla import READ_GRADIENTS_BY_XLA
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.programs.tracing import trace
from attn_dispatch.xla import blocks
from tests.support.option_parts import options_with, spec_with

B, T, S, N, K, H = 2, 21, 26, 4, 2, 8
_rng = np.random.default_rng(0)
Q, KEY, V = (
    jnp.asarray(_rng.standard_normal(x), jnp.float32)
    for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
)
OUT_GRAD = jnp.asarray(_rng.standard_normal((B, T, N, H)), jnp.float32)
SLOPES = jnp.asarray(_rng.random(N), jnp.float32)
TABLE = jnp.asarray(_rng.standard_normal((N, 8)), jnp.float32)
PREFIX = jnp.array([3, 9])


def bent(score, b, n, t, s, slopes):
    return 2 * jnp.tanh(score / 2) - slopes[n] * jnp.log1p((t - s).astype(score.dtype)) * (b + 1)


def prefix(b, n, t, s, lengths):
    return (s <= t) | (s < lengths[b])


def indices() -> tuple[jax.Array, ...]:
    return tuple(jnp.ogrid[:B, :N, :T, :S])


def written_out(q, k, v, score_of, mask) -> jax.Array:
    """Attention with all scores at once; score_of(scores, b, n, t, s)."""
    mask = jnp.broadcast_to(mask, (q.shape[0], N, T, S))
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(*q.shape[:2], K, N // K, H), k)
    scores = scores.reshape(-1, N, T, S) * H**-0.5
    b, n, t, s = indices()
    # NaN where a pair may not attend would reach the gradients here.
    scores = score_of(scores, b, n, jnp.where(mask, t, 0), jnp.where(mask, s, 0))
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", p.reshape(-1, K, N // K, T, S), v)
    return out.reshape(q.shape)


def gradients(call, *arrays: Any) -> tuple[jax.Array, ...]:
    numbers = tuple(range(len(arrays)))
    return jax.jit(jax.grad(lambda *x: (call(*x) * OUT_GRAD).sum(), numbers))(*arrays)


def assert_same(got: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[2**27, 4000], ids=["one block", "many blocks"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(blocks, "SCORE_BYTES", request.param)
    monkeypatch.setattr(blocks, "ENOUGH_ROWS", 2)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("causality", ["is_causal", "mask_mod", "lengths too"])
def test_values_and_gradients(causality: str):
    """Gradients of query, key, value and an array; log1p is NaN or infinite in masked pairs."""
    _, _, t, s = indices()
    mask = s <= t
    options: dict[str, Any] = {"is_causal": True}
    if causality == "mask_mod":
        options: dict[str, Any] = {"mask_mod": lambda b, n, t, s: s <= t}
    if causality == "lengths too":
        lengths = jnp.array([20, 7])
        options["key_value_seq_lengths"] = lengths
        mask = mask & (s < lengths[:, None, None, None])

    def ours(q, k, v, slopes):
        return dot_product_attention(q, k, v, score_mod=bent, score_mod_args=(slopes,), **options)

    def plain(q, k, v, slopes):
        return written_out(q, k, v, lambda x, b, n, t, s: bent(x, b, n, t, s, slopes), mask)

    arrays = (Q, KEY, V, SLOPES)
    assert_same(jax.jit(ours)(*arrays), plain(*arrays))
    assert_same(gradients(ours, *arrays), gradients(plain, *arrays))


@pytest.mark.usefixtures("block_bytes")
def test_a_trained_table():
    def mod(score, b, n, t, s, table):
        return score + table[n, jnp.clip(t - s + 4, 0, 7)]

    def ours(q, k, v, table):
        return dot_product_attention(q, k, v, score_mod=mod, score_mod_args=(table,))

    def plain(q, k, v, table):
        return written_out(q, k, v, lambda *x: mod(*x, table), jnp.bool_(True))

    arrays = (Q, KEY, V, TABLE)
    assert_same(gradients(ours, *arrays), gradients(plain, *arrays))


def test_captured_arrays_are_differentiated():
    def given(slopes):
        return dot_product_attention(
            Q, KEY, V, is_causal=True, score_mod=bent, score_mod_args=(slopes,)
        )

    def captured(slopes):
        mod = lambda score, b, n, t, s: bent(score, b, n, t, s, slopes)  # noqa: E731
        return dot_product_attention(Q, KEY, V, is_causal=True, score_mod=mod)

    assert_same(gradients(captured, SLOPES), gradients(given, SLOPES))


def test_derivatives_of_other_kinds():
    def ours(slopes):
        return dot_product_attention(
            Q, KEY, V, is_causal=True, score_mod=bent, score_mod_args=(slopes,)
        )

    def plain(slopes):
        _, _, t, s = indices()
        return written_out(Q, KEY, V, lambda *x: bent(*x, slopes), s <= t)

    assert_same(jax.jit(jax.jacfwd(ours))(SLOPES), jax.jit(jax.jacfwd(plain))(SLOPES))
    loss = lambda call: lambda x: (call(x) * OUT_GRAD).sum()  # noqa: E731
    hessians = (jax.jit(jax.hessian(loss(call)))(SLOPES) for call in (ours, plain))
    assert_same(*hessians, tolerance=1e-4)


@pytest.mark.parametrize("mapped", ["q", "array", "both", "inner and outer"])
def test_vmap(mapped: str):
    """b counts the batch rows of one call, and each call has its own arrays."""
    copies = jnp.arange(1.0, 4.0)[:, None]
    queries, slopes = jnp.stack([Q, 2 * Q, 3 * Q]), copies * SLOPES

    def call(q, slopes):
        return dot_product_attention(
            q, KEY, V, is_causal=True, score_mod=bent, score_mod_args=(slopes,),
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
def test_each_key_has_a_copy_of_a_learned_table(mapped: bool, monkeypatch: pytest.MonkeyPatch):
    """Which changes no gradient; a large table has none."""
    tables = jnp.stack([TABLE, 2 * TABLE]) if mapped else TABLE

    def near(score, b, n, t, s, table):
        return score + table[n, jnp.clip(t - s, 0, 7)] * (b + 1)

    def of_one(table):
        out = dot_product_attention(Q, KEY, V, score_mod=near, score_mod_args=(table,))
        return (out * OUT_GRAD).sum()

    def total(tables):
        return jax.vmap(of_one)(tables).sum() if mapped else of_one(tables)

    def found() -> tuple[jax.Array, str]:
        jax.clear_caches()
        lowered = jax.jit(jax.grad(total)).lower(tables)
        return lowered.compile()(tables), lowered.as_text()

    copies = f"{4 if mapped else ''}x{S}x{N}x8xf32".removeprefix("x")
    gradient, text = found()
    assert copies in text
    monkeypatch.setattr("attn_dispatch.semantics.mods._MAX_COPIED_ELEMENTS", S * N * 8 - 1)
    expected, text = found()
    assert copies not in text
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_segments_and_sequences_count_inside():
    """And b is the sequence where sequences are given by their starts."""
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
        own = lambda *x, i=i: with_sequence(x[0], i, *x[2:])  # noqa: E731
        assert_same(ragged[first:last], dot_product_attention(*part, score_mod=own)[0])


def test_equal_functions_are_one_program():
    def made(factor):
        return lambda score, b, n, t, s: score * factor + SLOPES[n]

    class Own:
        def mod(self, score, b, n, t, s):
            return score * 2.0 + SLOPES[n]

    def with_more(factor, score, b, n, t, s):
        unused = jnp.exp(score)
        del unused
        return jax.jit(lambda x: x * factor)(score) + SLOPES[n]

    functions = [made(2.0), made(2.0), Own().mod, functools.partial(with_more, 2.0)]
    programs = {trace("score_mod", x, (), "float32").program for x in functions}
    assert len(programs) == 1
    others = [trace("score_mod", made(x), (), "float32").program for x in (2.5, 3.0)]
    assert len({*programs, *others}) == 3


def test_a_rule_of_its_own_for_the_derivative_is_part_of_a_program():
    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvp(lambda primals, tangents: (straight(*primals), tangents[0]))
    functions = [
        lambda score, b, n, t, s: straight(score),
        lambda score, b, n, t, s: jnp.round(score),
    ]
    one, other = (trace("score_mod", x, (), "float32").program for x in functions)
    assert str(one) == str(other) and one != other
    gradients_of = [
        gradients(lambda q, x=x: dot_product_attention(q, KEY, V, score_mod=x), Q)
        for x in functions
    ]
    assert bool(gradients_of[0][0].any()) and not bool(gradients_of[1][0].any())


def test_calls_with_equal_functions_compile_once():
    def call(q, factor):
        mod = lambda score, b, n, t, s: score * factor  # noqa: E731
        return dot_product_attention(q, KEY, V, score_mod=mod)

    texts = {jax.jit(functools.partial(call, factor=2.0)).lower(Q).as_text() for _ in range(2)}
    assert len(texts) == 1


_ARRAY = np.arange(3.0)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (3, (), "expected a function or None, got 3"),
        (SLOPES, (), r"expected a function or None, got an array float32\[4\]$"),
        (lambda score, b: score, (), r"a function of \(score, b, n, t, s\), got one of \(score, b"),
        (lambda score, b, n, t, s: score, (SLOPES,), r"score_mod_args\[0\]\), got one of"),
        (lambda score, b, n, t, s: t, (), r"expected a floating scalar as the result, got int32"),
        (lambda score, b, n, t, s: (score,), (), r"a floating scalar as the result, got a tuple"),
        (lambda score, b, n, t, s: "yes", (), r"a floating scalar as the result, got a str"),
        (lambda score, b, n, t, s: SLOPES, (), r"a floating scalar as the result, got float32\[4"),
        (lambda score, b, n, t, s: (score, b), (), r"got float32\[\], int32\[\]; it is called for"),
        (lambda score, b, n, t, s: score if t > s else 0.0, (), r"here.* \(at test_mods.py:\d+\)$"),
        (lambda score, b, n, t, s: score + (t > s and 1), (), "write jnp.where"),
        (lambda score, b, n, t, s: score + _ARRAY[n], (), r"jnp.asarray\(array\)\[index\]"),
        (lambda score, b, n, t, s: SLOPES[score], (), "to be indexed with b, n, t, s"),
        (lambda score, b, n, t, s: score, 3, "score_mod_args: expected a tuple of arrays, got 3"),
    ],
)  # fmt: skip
def test_what_is_no_score_mod(function: Any, arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(Q, KEY, V, score_mod=function, score_mod_args=arguments)


def test_side_effects_are_refused():
    def mod(score, b, n, t, s):
        jax.debug.print("{}", score)
        return score

    with pytest.raises(ValueError, match="without side effects"):
        dot_product_attention(Q, KEY, V, score_mod=mod)


def test_a_mask_mod_says_yes_or_no():
    with pytest.raises(ValueError, match="expected a bool scalar as the result, got int32"):
        dot_product_attention(Q, KEY, V, mask_mod=lambda b, n, t, s: t - s)
    with pytest.raises(ValueError, match=r"got an array bool\[10, 14\]; the argument mask takes"):
        dot_product_attention(Q, KEY, V, mask_mod=jnp.ones((10, 14), bool))  # pyright: ignore
    with pytest.raises(ValueError, match=r"got one of \(score, b, n, t, s\)$"):
        dot_product_attention(Q, KEY, V, mask_mod=mods.soft_cap(3.0))
    with pytest.raises(ValueError, match="mask_mod_args: expected none without mask_mod"):
        dot_product_attention(Q, KEY, V, mask_mod_args=(SLOPES,))


def test_one_query_of_a_cache():
    mod = lambda score, b, n, t, s: score - SLOPES[n] * s  # noqa: E731
    got = dot_product_attention(Q[:, :1], KEY, V, score_mod=mod)
    _, n, _, s = indices()
    bias = jnp.broadcast_to(-SLOPES[n] * s, (1, N, 1, S))
    assert_same(got, dot_product_attention(Q[:, :1], KEY, V, bias=bias))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        q, k, v = (x.astype(dtype) for x in (Q, KEY, V))

        def call(q):
            out = dot_product_attention(q, k, v, score_mod=bent, score_mod_args=(SLOPES,),
                                        is_causal=True)  # fmt: skip
            return (out.astype(jnp.float32) * OUT_GRAD).sum()

        grad = jax.grad(call)(q)
    assert grad.dtype == dtype
    exact = gradients(
        lambda q: dot_product_attention(
            q, KEY, V, score_mod=bent, score_mod_args=(SLOPES,), is_causal=True
        ),
        Q,
    )
    assert_same(grad.astype(jnp.float32), exact[0], tolerance=5e-2)


@pytest.mark.parametrize("gradients", [("query", "score_mod_0"), ("score_mod_0",)])
def test_gradients_of_arrays_come_from_xla_beside_a_kernel(gradients: tuple[str, ...]):
    program = trace("score_mod", bent, (SLOPES,), "float32").program
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

    def by(who: str):
        return lambda spec, operands: {x: who for x in spec.wanted.gradients}

    calls: Any = Calls(by("kernel"), by("xla"), by("kernel"))
    found: Any = READ_GRADIENTS_BY_XLA.compute(spec, READ_GRADIENTS_BY_XLA.inner(spec), {}, calls)
    assert found["score_mod_0"] == "xla"
    assert "query" not in gradients or found["query"] == "kernel"
    dropping = spec_with(spec, dropout_rate=0.5)
    assert READ_GRADIENTS_BY_XLA.applied(dropping) is None


def test_sums_in_any_order_are_refused_where_they_must_not_be(monkeypatch: pytest.MonkeyPatch):
    x, slopes = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16), jnp.ones(4)

    def refused(**options: Any) -> bool:
        found = explain(
            x, x, x, score_mod=mods.alibi(slopes), deterministic_backward=True, **options
        )
        return "in any order" in str(found)

    assert refused(target="sm90") and not refused()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert not refused(target="sm90")


def test_arrays_that_jitted_functions_capture():
    """They are what the mod reads, too, and no part of a plan that another one's call may share."""
    q, k, v = (jnp.ones((2, 5, 2, 4)) * x for x in (0.3, 0.7, 1.0))
    v = v * jnp.arange(5.0)[:, None, None]

    def slopes(values: Any) -> Any:
        of = jax.jit(lambda n: values[n])
        inner = jax.jit(lambda x, d, n: x - of(n) * d)
        return lambda score, b, n, t, s: inner(score, jnp.abs(t - s), n)

    def call(values: Any, *, mod: Any = slopes) -> Any:
        return dot_product_attention(q, k, v, score_mod=mod(values))

    for values in (jnp.ones(2), jnp.zeros(2), jnp.arange(2.0)):
        plain = dot_product_attention(q, k, v, alibi_slopes=values)
        np.testing.assert_allclose(call(values), plain, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(call)(values), plain, rtol=1e-6)
    lengths = jnp.array([1, 4])
    masked = dot_product_attention(q, k, v, mask_mod=jax.jit(lambda b, n, t, s: s < lengths[b]))
    plain = dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(masked, plain, rtol=1e-6)


def test_arrays_that_are_captured_where_nobody_finds_them():
    values = jnp.arange(4.0)
    inner = jax.jit(lambda i, x: x + values[i])

    def looping(score: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return jax.lax.fori_loop(0, 3, inner, score)

    q = jnp.ones((1, 3, 1, 4))
    try:
        got = dot_product_attention(q, q, q, score_mod=looping, return_lse=True)[1]
    except ValueError as error:
        assert "score_mod_args" in str(error)
    else:
        plain = dot_product_attention(q, q, q, bias=jnp.full((1, 3, 3), 3.0), return_lse=True)[1]
        np.testing.assert_allclose(got, plain, rtol=1e-6)


def test_a_rule_that_closes_over_an_array_without_a_derivative():
    table = jnp.arange(4.0)

    @jax.custom_vjp
    def moved(x, d):
        return x + table[2] * d

    moved.defvjp(lambda x, d: (x + table[2] * d, None), lambda _, g: (g, table[2] * g))
    q = jnp.ones((1, 3, 1, 4))
    mod = lambda x, b, n, t, s: moved(x, (s - t) * 1.0)  # noqa: E731
    plain = lambda x, b, n, t, s: x + 2.0 * (s - t)  # noqa: E731
    got, expected = (dot_product_attention(q, q, q, score_mod=x) for x in (mod, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_gradients_of_16_bit_tables_are_added_up_in_float32():
    """One in float32 that holds the same numbers is not trained better."""
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
