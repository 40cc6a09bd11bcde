"""score_mod and mask_mod as functions: equal ones, captured arrays, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, mods
from attn_dispatch.programs.tracing import trace
from tests.support.mod_arrays import KEY, SLOPES, Q, V, gradients


def test_equal_functions_are_one_program():
    def scaled(factor):
        return lambda score, b, n, t, s: score * factor + SLOPES[n]

    class WithMethod:
        def mod(self, score, b, n, t, s):
            return score * 2.0 + SLOPES[n]

    def with_unused(factor, score, b, n, t, s):
        unused = jnp.exp(score)
        del unused
        return jax.jit(lambda x: x * factor)(score) + SLOPES[n]

    functions = [scaled(2.0), scaled(2.0), WithMethod().mod, functools.partial(with_unused, 2.0)]
    programs = {trace("score_mod", x, (), "float32").program for x in functions}
    assert len(programs) == 1
    others = [trace("score_mod", scaled(x), (), "float32").program for x in (2.5, 3.0)]
    assert len({*programs, *others}) == 3


def test_custom_derivative_rule_is_part_of_a_program():
    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvp(lambda primals, tangents: (straight(*primals), tangents[0]))
    functions = [
        lambda score, b, n, t, s: straight(score),
        lambda score, b, n, t, s: jnp.round(score),
    ]
    first, second = (trace("score_mod", x, (), "float32").program for x in functions)
    assert str(first) == str(second) and first != second
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


def test_an_index_that_is_no_integer_raises():
    with pytest.raises(ValueError, match="to be indexed with b, n, t, s"):
        dot_product_attention(Q, KEY, V, score_mod=lambda score, b, n, t, s: SLOPES[score])


def test_side_effects_raise():
    def mod(score, b, n, t, s):
        jax.debug.print("{}", score)
        return score

    with pytest.raises(ValueError, match="without side effects"):
        dot_product_attention(Q, KEY, V, score_mod=mod)


def test_deterministic_backward_refuses_unordered_sums(monkeypatch: pytest.MonkeyPatch):
    x, slopes = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16), jnp.ones(4)

    def refused(**options: Any) -> bool:
        found = explain(
            x, x, x, score_mod=mods.alibi(slopes), deterministic_backward=True, **options
        )
        return "in any order" in str(found)

    assert refused(target="sm90") and not refused()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert not refused(target="sm90")


def test_arrays_captured_by_jitted_functions():
    """The mod reads the captured arrays, and calls with other arrays share no plan."""
    q, k, v = (jnp.ones((2, 5, 2, 4)) * x for x in (0.3, 0.7, 1.0))
    v = v * jnp.arange(5.0)[:, None, None]

    def slopes(values: Any) -> Any:
        value_of = jax.jit(lambda n: values[n])
        inner = jax.jit(lambda x, d, n: x - value_of(n) * d)
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


def test_array_captured_inside_a_loop_is_found_or_raises():
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


def test_derivative_rule_can_capture_an_array():
    table = jnp.arange(4.0)

    @jax.custom_vjp
    def shifted(x, d):
        return x + table[2] * d

    shifted.defvjp(lambda x, d: (x + table[2] * d, None), lambda _, g: (g, table[2] * g))
    q = jnp.ones((1, 3, 1, 4))
    mod = lambda x, b, n, t, s: shifted(x, (s - t) * 1.0)  # noqa: E731
    plain = lambda x, b, n, t, s: x + 2.0 * (s - t)  # noqa: E731
    got, expected = (dot_product_attention(q, q, q, score_mod=x) for x in (mod, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
