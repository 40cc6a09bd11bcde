"""score_mod and mask_mod with other options, and which functions can be mods."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain
from attn_dispatch.programs.tracing import trace
from tests.support.mod_calls import (
    KEY,
    SLOPES,
    TABLE,
    B,
    H,
    K,
    N,
    Q,
    S,
    T,
    V,
    added,
    as_bias,
    assert_same,
    captured,
    given,
    with_bias,
    with_gradients,
)

# With other options.

OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)},
    "sinks, ALiBi": {"sinks": SLOPES, "alibi_slopes": SLOPES},
    "soft cap": {"logits_soft_cap": 1.5},
    "scale": {"scale": SLOPES},
    "window": {"local_window_size": (2, 1)},
    "lengths, bottom right": {
        "query_seq_lengths": np.array([3, 9]), "key_value_seq_lengths": np.array([11, 2]),
        "is_causal": True, "causal_alignment": "bottom_right",
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::attn_dispatch.AttentionConventionWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_mods_with_other_options_agree_with_a_bias(name: str):
    programs = (
        jax.jit(lambda *x, f=f: with_gradients(lambda *y: f(*y, **OPTIONS[name]), *x))
        for f in (captured, with_bias)
    )
    assert_same(*(f(Q, TABLE) for f in programs))


def test_mods_count_positions_in_segments_of_any_order():
    ids = np.array([[2, 1, 2, 1, 0, 3, 3, 1, 2], [1, 1, 1, 5, 5, 5, 0, 0, 9]])
    key_ids = np.array([[1, 2, 1, 2, 0, 3, 3, 1, 2, 2, 2], [9, 9, 5, 5, 5, 1, 1, 1, 1, 0, 0]])
    places, key_places = (
        np.array([[(row[:i] == x).sum() for i, x in enumerate(row)] for row in rows])
        for rows in (ids, key_ids)
    )
    t, s = places[:, None, :, None], key_places[:, None, None, :]
    is_same = ids[:, None, :, None] == key_ids[:, None, None, :]

    def ours(q, table):
        segments: dict[str, Any] = {"query_segment_ids": ids, "key_value_segment_ids": key_ids}
        return given(q, table, mask_mod=lambda b, n, t, s: s <= t, **segments)

    def plain(q, table):
        mask = is_same & (ids[:, None, :, None] > 0) & (s <= t)
        return dot_product_attention(q, KEY, V, as_bias(table, t, s), mask)

    assert_same(*(with_gradients(f, Q, TABLE) for f in (ours, plain)))


@pytest.mark.parametrize("lengths", [(1, S), (T, 1), (1, 1), (0, S), (T, 0)])
def test_short_and_empty_calls(lengths):
    t, s = lengths

    def program(**options):
        call = lambda q, k, v: dot_product_attention(q, k, v, **options)  # noqa: E731
        return with_gradients(call, Q[:, :t], KEY[:, :s], V[:, :s])

    mask = np.arange(s) <= np.arange(t)[:, None] + 1
    got = program(score_mod=added, score_mod_args=(TABLE,), mask_mod=lambda b, n, t, s: s <= t + 1)
    assert_same(got, program(bias=as_bias(TABLE)[:, :, :t, :s], mask=mask))


# Functions that can be mods.


def _after_loop(score, b, n, t, s):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.nn.relu(TABLE[n, i]), score)


def _after_branch(score, b, n, t, s):
    return jax.lax.cond(t > s, jax.nn.softplus, lambda x: SLOPES[n] * x, score)


MODS = {
    "one score for all": (lambda score, b, n, t, s: 1.0, lambda x, n, t, s: 0 * x),
    "the score as it is": (lambda score, b, n, t, s: score, lambda x, n, t, s: x),
    "without the score": (lambda score, b, n, t, s: -1.0 * s, lambda x, n, t, s: 0 * x - s),
    "a loop": (_after_loop, lambda x, n, t, s: x + jax.nn.relu(TABLE[n, :3]).sum(-1)),
    "branches": (
        _after_branch, lambda x, n, t, s: jnp.where(t > s, jax.nn.softplus(x), SLOPES[n] * x)
    ),
    "bfloat16": (
        lambda score, b, n, t, s: score.astype(jnp.bfloat16),
        lambda x, n, t, s: x.astype(jnp.bfloat16).astype(jnp.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_function_serves_as_a_score_mod(name: str):
    mod, on_all_scores = MODS[name]
    _, n, t, s = jnp.ogrid[:B, :N, :T, :S]

    def plain(q):
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), KEY) * H**-0.5
        p = jax.nn.softmax(on_all_scores(scores.reshape(B, N, T, S), n, t, s))
        return jnp.einsum("bkgts,bskh->btkgh", p.reshape(B, K, -1, T, S), V).reshape(Q.shape)

    ours = lambda q: dot_product_attention(q, KEY, V, score_mod=mod)  # noqa: E731
    assert_same(
        *(with_gradients(f, Q) for f in (ours, plain)), tolerance=2e-2 if "16" in name else 1e-4
    )


@pytest.mark.parametrize("constant", [True, np.bool_(False)])
def test_mask_mod_with_a_constant_result(constant: Any):
    """If no query attends to any key, all results are 0, whatever score_mod returns."""
    got = with_gradients(lambda *x: captured(*x, mask_mod=lambda b, n, t, s: constant), Q, TABLE)
    expected = with_gradients(with_bias, Q, TABLE)
    assert_same(got, expected if constant else jax.tree.map(jnp.zeros_like, expected))


def test_large_captured_arrays_do_not_become_constants():
    large = jnp.ones((N, 1 << 20), jnp.float32)
    for x in (large, np.asarray(large)):
        mod = lambda score, b, n, t, s, x=x: score + jnp.asarray(x)[n, t * s]  # noqa: E731
        call = jax.jit(lambda q, mod=mod: dot_product_attention(q, KEY, V, score_mod=mod))
        assert len(call.lower(Q).as_text()) < 100_000
        assert len(trace("score_mod", mod, (), "float32").program.text) < 2000


def test_explain_accepts_arrays_without_values():
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, KEY, V, TABLE)]
    found = explain(*types[:3], score_mod=added, score_mod_args=(types[3],))
    assert str(found) == str(explain(Q, KEY, V, score_mod=added, score_mod_args=(TABLE,)))
