"""`ragged_dot_product_attention`: packed sequences, and the calls that it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, ragged_dot_product_attention

CU_Q = np.array([0, 3, 3, 9, 10])
CU_KV = np.array([0, 4, 6, 13, 13])
MAX_LENGTHS: dict[str, Any] = {"max_seqlen_q": 6, "max_seqlen_kv": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (1, 2), "causal_alignment": "bottom_right"},
    "soft_cap": {"logits_soft_cap": 1.5},
}


def arrays(dtype: Any = jnp.float32) -> list[jax.Array]:
    """12 queries and 14 keys; the sequences take 10 and 13 of them."""
    rng = np.random.default_rng(0)
    shapes = ((12, 4, 8), (14, 2, 8), (14, 2, 6))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def ragged(q, k, v, **options: Any) -> Any:
    given: dict[str, Any] = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV} | MAX_LENGTHS | options
    return ragged_dot_product_attention(q, k, v, **given)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_equals_a_separate_call(options):
    q, k, v = arrays()
    out, lse = ragged(q, k, v, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((12, 4, 6), (12, 4))
    expected, expected_lse = np.zeros((12, 4, 6)), np.full((12, 4), -np.inf)
    for m in range(4):
        rows, cols = slice(*CU_Q[m : m + 2]), slice(*CU_KV[m : m + 2])
        if rows.start < rows.stop and cols.start < cols.stop:
            expected[rows], expected_lse[rows] = dot_product_attention(
                q[rows], k[cols], v[cols], return_lse=True, **options
            )
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_a_sequence_does_not_affect_the_others():
    q, k, v = arrays()

    def gradients(q, k, v):
        return jax.grad(lambda *x: (ragged(*x) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)

    plain, out = gradients(q, k, v), ragged(q, k, v)
    changed = [x.at[lo:hi].mul(3) for x, (lo, hi) in zip((q, k, v), [(3, 9), (6, 13), (6, 13)],
                                                         strict=True)]  # fmt: skip
    outside = np.r_[0:3, 9:12]
    np.testing.assert_array_equal(ragged(*changed)[outside], out[outside])
    np.testing.assert_array_equal(gradients(*changed)[0][outside], plain[0][outside])
    for got, expected in zip(gradients(*changed)[1:], plain[1:], strict=True):
        np.testing.assert_array_equal(got[:6], expected[:6])


def test_rows_outside_every_sequence_affect_nothing():
    q, k, v = arrays()
    poisoned = q.at[10:].set(np.nan), k.at[13:].set(np.inf), v.at[13:].set(np.nan)
    out, pull = jax.vjp(ragged, *poisoned)
    np.testing.assert_array_equal(out, ragged(q, k, v))
    for gradient in pull(out.at[10:].set(np.nan)):
        assert np.isfinite(gradient).all()
    assert not pull(out)[0][10:].any() and not pull(out)[1][13:].any()


def test_vmap_and_jit_over_cu_seqlens_equal_single_calls():
    q, k, v = arrays()
    cu_q = jnp.stack([CU_Q, jnp.array([0, 0, 1, 2, 7])])
    cu_kv = jnp.stack([CU_KV, jnp.array([0, 2, 2, 4, 10])])

    @jax.jit
    def both(cu_q, cu_kv):
        return jax.vmap(lambda a, b: ragged(q, k, v, cu_seqlens_q=a, cu_seqlens_kv=b))(cu_q, cu_kv)

    for i, out in enumerate(both(cu_q, cu_kv)):
        alone = ragged(q, k, v, cu_seqlens_q=cu_q[i], cu_seqlens_kv=cu_kv[i])
        np.testing.assert_allclose(out, alone, atol=1e-6)


def test_wrong_traced_cu_seqlens_make_every_row_nan():
    """The boundaries are traced, since concrete ones are checked before the call."""
    q, k, v = arrays()
    call = jax.jit(lambda cu_q, cu_kv: ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=12, max_seqlen_kv=14,
        return_lse=True,
    ))  # fmt: skip
    right_q, right_kv = jnp.array([0, 5, 8, 8, 12]), jnp.array([0, 2, 4, 9, 14])
    assert all(np.isfinite(x).all() for x in call(right_q, right_kv))
    for wrong in ([1, 5, 8, 8, 12], [0, 5, 99, 99, 99], [0, 5, 3, 8, 12], [-4, 5, 8, 8, 12]):
        for got in (call(jnp.array(wrong), right_kv), call(right_q, jnp.array(wrong))):
            assert all(np.isnan(x).all() for x in got)


@pytest.mark.parametrize("longest", [{"max_seqlen_q": 3}, {"max_seqlen_kv": 4}])
def test_a_sequence_that_is_too_long_alone_is_nan(longest):
    q, k, v = arrays()

    def run(q, k, v, longest):
        return jax.jit(lambda q, k, v, cu_q, cu_kv: ragged_dot_product_attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, return_lse=True, **longest,
        ))(q, k, v, jnp.array([0, 3, 8, 11]), jnp.array([0, 4, 9, 13]))  # fmt: skip

    enough = {"max_seqlen_q": 12, "max_seqlen_kv": 14}
    for got, expected in zip(run(q, k, v, enough | longest), run(q, k, v, enough), strict=True):
        expected = np.array(expected)
        expected[3:8] = np.nan
        np.testing.assert_array_equal(got, expected)

    def loss(operands, longest):
        out, lse = run(*operands, longest)
        return jnp.nansum(out**2) + jnp.nansum(jnp.where(jnp.isfinite(lse), lse, 0))

    for x, rows in zip(
        jax.grad(loss)((q, k, v), enough | longest), ((3, 8), (4, 9), (4, 9)), strict=True
    ):
        assert np.isfinite(x).all() and np.any(x != 0)
        assert np.all(x[slice(*rows)] == 0)


def test_explain_chooses_aiter_for_a_ragged_call():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    explanation = explain(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_KV, **MAX_LENGTHS,
                          target="gfx942")  # fmt: skip
    assert explanation.chosen_forward == explanation.chosen_backward == "aiter"
    assert "max_seq_lens=(6, 7)" in " ".join(str(explanation).split())
