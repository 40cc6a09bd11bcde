"""The public calls where AITER is chosen; the CPU stands in for an AMD GPU."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import (
    AttentionFallbackWarning,
    dot_product_attention,
    explain,
    mods,
    ragged_dot_product_attention,
)
from tests.support.aiter_public import SLOPES, arrays, assert_close, value_and_gradients

TABLE, BIAS = (
    jnp.linspace(-2, 2, math.prod(shape)).reshape(shape).astype(jnp.bfloat16)
    for shape in ((32, 4), (4, 24, 40))
)

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"local_window_size": (4, 2)},
        {"key_value_seq_lengths": np.array([13, 0]), "is_causal": True},
        {"bias": np.linspace(-2, 2, 4 * 24 * 40).reshape(4, 24, 40).astype(jnp.bfloat16)},
        {"alibi_slopes": SLOPES, "is_causal": True},
        {"deterministic_backward": True},
        {
            "query_segment_ids": np.repeat([[1, 2, 4], [0, 1, 1]], 8, axis=1),
            "key_value_segment_ids": np.repeat([[0, 1, 3, 4], [1, 1, 2, 0]], 10, axis=1),
            "max_segments": 4,
            "is_causal": True,
        },
    ],
    ids=str,
)
def test_aiter_agrees_with_xla(emulator, options):
    got = value_and_gradients(*arrays(), **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))
    assert emulator.calls("forward") == 1


_WRITTEN_OUT_ALIBI = {"score_mod": lambda x, b, n, t, s: x + SLOPES[n] * (s - t), "is_causal": True}


MODS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft cap": ("as logits_soft_cap", {"score_mod": mods.soft_cap(2.0), "is_causal": True}),
    "a sum": ("as a bias", {"score_mod": lambda x, b, n, t, s: x + BIAS[n, t, s]}),
    "ALiBi": ("as alibi_slopes", {"score_mod": mods.alibi(SLOPES), "is_causal": True}),
    "ALiBi both ways": ("as alibi_slopes", {"score_mod": mods.alibi(SLOPES)}),
    "ALiBi, written out": ("as alibi_slopes", _WRITTEN_OUT_ALIBI),
    "ALiBi of one slope": (
        "as alibi_slopes",
        {"score_mod": lambda x, b, n, t, s: x - 0.5 * jnp.abs(t - s)},
    ),
    "ALiBi by formula": (
        "as alibi_slopes",
        {"score_mod": lambda x, b, n, t, s: x - 2.0 ** -(n + 1.0) * jnp.abs(t - s)},
    ),
    "T5": ("as a bias", {"score_mod": mods.relative_position(TABLE)}),
    "prefix": ("as a mask", {"mask_mod": mods.prefix_lm(np.array([13, 0]))}),
    "chunks": ("as a mask", {"mask_mod": mods.chunked_window(7)}),
}


@pytest.mark.parametrize("name", MODS)
def test_mods_that_aiter_has_an_option_for_run_on_aiter(emulator, name: str):
    """Both passes run on AITER, except the backward pass of the soft cap, which CK lacks."""
    how, options = MODS[name]
    assert how in str(explain(*arrays(), **options))
    with attn_dispatch.fallback("silent" if "cap" in name else "error"):
        got = value_and_gradients(*arrays(), **options)
    assert emulator.calls("forward") == 1 and emulator.calls("backward") == ("cap" not in name)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))


@pytest.mark.parametrize(
    ("mod", "array"), [(mods.relative_position, TABLE), (mods.alibi, SLOPES)], ids=["T5", "ALiBi"]
)
def test_gradients_of_the_arrays_that_mods_read_agree_with_xla(
    emulator, mod: Any, array: jax.Array
):
    """The gradient of a table follows from that of the bias; XLA computes that of slopes."""

    def gradients(implementation: str | None) -> list[np.ndarray]:
        def loss(array, q):
            _, k, v = arrays()
            options: dict[str, Any] = {
                "score_mod": mod(array),
                "is_causal": True,
                "implementation": implementation,
            }
            return (dot_product_attention(q, k, v, **options).astype(jnp.float32) ** 2).sum()

        found = jax.jit(jax.grad(loss, (0, 1)))(array, arrays()[0])
        return [np.asarray(x, np.float32) for x in found]

    got = gradients(None)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    for x, y in zip(got, gradients("xla"), strict=True):
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


def test_aiter_computes_the_gradient_through_lse(emulator):
    q, k, v = arrays()

    def loss(q, k, v, implementation=None):
        out, lse = dot_product_attention(
            q, k, v, is_causal=True, return_lse=True, implementation=implementation
        )
        return (out.astype(jnp.float32) * jnp.cos(lse)[..., None]).sum() + (lse**2).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    got = [np.asarray(x, np.float32) for x in gradients(q, k, v)]
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    expected = [np.asarray(x, np.float32) for x in gradients(q, k, v, "xla")]
    for x, y in zip(got, expected, strict=True):
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


def test_wrong_traced_segment_ids_give_the_result_of_xla():
    ids = jnp.array([[2, 1, 2, 3, 3, 9, -1, 3] * 3, [1, 0, 1, 2, 2, 0, 7, 4] * 3])

    @partial(jax.jit, static_argnums=1)
    def call(ids, implementation):
        x = arrays()[0]
        return dot_product_attention(
            x, x, x, query_segment_ids=ids, max_segments=5, is_causal=True, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    (out, lse), (expected, expected_lse) = call(ids, "aiter"), call(ids, "xla")
    np.testing.assert_array_equal(lse == -jnp.inf, expected_lse == -jnp.inf)
    assert_close([np.asarray(out, np.float32)], [np.asarray(expected, np.float32)])


NARROW = np.linspace(-2, 2, 4 * 24 * 40).reshape(4, 24, 40).astype(jnp.bfloat16)


FLOAT32_BIASES = {
    "exact": (NARROW.astype(np.float32), 1),
    "of a mask": (np.where(NARROW > 0, 0, -np.inf).astype(np.float32), 1),
    "not exact": (NARROW.astype(np.float32) + np.float32(1e-4), 0),
    "NaN": (np.where(np.arange(40) == 3, np.nan, NARROW).astype(np.float32), 0),
}


@pytest.mark.parametrize(("bias", "calls"), FLOAT32_BIASES.values(), ids=FLOAT32_BIASES)
def test_a_float32_bias_runs_on_aiter_if_16_bits_hold_it(emulator, bias, calls):
    def value_and_gradient(bias, implementation=None):
        def call(bias):
            return dot_product_attention(*arrays(), bias=bias, implementation=implementation)

        out, pull = jax.vjp(jax.jit(call), bias)
        return [np.asarray(x, np.float32) for x in (out, *pull(out))]

    with pytest.raises(NotImplementedError, match="bias: AITER needs query's dtype"):
        value_and_gradient(jnp.asarray(bias))  # under fallback("error"), since XLA may compute it
    with pytest.raises(NotImplementedError, match="bias: AITER needs query's dtype"):
        value_and_gradient(jnp.asarray(bias), "aiter")
    with attn_dispatch.fallback("warn"):
        with pytest.warns(AttentionFallbackWarning, match="may fall back to xla, .* when it runs"):
            got = value_and_gradient(jnp.asarray(bias))
    assert (emulator.calls("forward"), emulator.calls("backward")) == (calls, calls)
    assert_close(got, value_and_gradient(jnp.asarray(bias), "xla"))


def test_vmapped_calls_are_one_kernel_call(emulator):
    qkv = [jnp.stack([x, 2 * x, x - 1]) for x in arrays()]
    lengths = jnp.array([[5, 24], [24, 0], [1, 2]])

    def call(q, k, v, lengths):
        return dot_product_attention(q, k, v, query_seq_lengths=lengths)

    got = jax.block_until_ready(jax.vmap(call)(*qkv, lengths))
    assert emulator.calls("forward") == 1
    for i in range(3):
        np.testing.assert_array_equal(got[i], call(*(x[i] for x in qkv), lengths[i]))


def test_vmapped_packed_calls_are_one_kernel_call(emulator):
    q, k, v = (x[0] for x in arrays())
    cu_q = jnp.array([[0, 3, 3, 20], [0, 10, 11, 24]])
    cu_kv = jnp.array([[0, 8, 9, 30], [0, 0, 16, 40]])

    def call(cu_q, cu_kv):
        return ragged_dot_product_attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=17, max_seqlen_kv=24,
            is_causal=True, causal_alignment="bottom_right",
        )  # fmt: skip

    got = jax.block_until_ready(jax.vmap(call)(cu_q, cu_kv))
    assert emulator.calls("forward") == 1
    for i in range(2):
        np.testing.assert_array_equal(got[i], call(cu_q[i], cu_kv[i]))


def test_deterministic_calls_are_bit_equal():
    first = value_and_gradients(*arrays(s=300), deterministic_backward=True)
    for x, y in zip(
        first, value_and_gradients(*arrays(s=300), deterministic_backward=True), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def test_the_reason_against_a_call_without_its_sinks_is_given():
    slopes = sinks = jnp.zeros(4)
    expected = r"(?s)falls back to xla.*aiter:\n    - CK has no logits_soft_cap together with"
    call = partial(dot_product_attention, *arrays(), logits_soft_cap=5.0, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match=expected):
        call(sinks=sinks)
    with pytest.raises(NotImplementedError, match="no implementation can run"):
        call(implementation="aiter")


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.tri(24, 40, 3, dtype=bool)},
        {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
        {"mask": np.tri(24, 40, 3, dtype=bool), "sinks": np.zeros(4, np.float32),
         "key_value_seq_lengths": np.array([13, 0]), "is_causal": True},
        {"bias": np.linspace(-2, 2, 24, dtype=np.float32)[:, None]},
        {"query_segment_ids": np.repeat([[1, 2, 4]], 8, axis=1),
         "key_value_segment_ids": np.repeat([[1, 2, 4, 5]], 10, axis=1), "b": 1},
    ],
    ids=str,
)  # fmt: skip
def test_rewritten_calls_run_on_aiter(emulator, options: dict[str, Any]):
    options = dict(options)
    operands = arrays(b=options.pop("b", 2))
    got = value_and_gradients(*operands, **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    assert_close(got, value_and_gradients(*operands, **options, implementation="xla"))
    assert emulator.calls("forward") == 1


def test_xla_computes_the_gradient_of_slopes_alone(emulator):
    def loss(slopes, *qkv, implementation=None):
        options = {"alibi_slopes": slopes, "is_causal": True, "implementation": implementation}
        return (dot_product_attention(*qkv, **options).astype(jnp.float32) ** 2).sum()

    slopes = jnp.linspace(0.1, 1, 4)
    got = jax.grad(loss, argnums=(0, 1, 2, 3))(slopes, *arrays())
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    xla = partial(loss, implementation="xla")
    expected = jax.grad(xla, argnums=(0, 1, 2, 3))(slopes, *arrays())
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (x, y)), atol=0.1, rtol=0.05
        )


def test_xla_computes_the_gradient_that_aiter_lacks(emulator):
    options = {"logits_soft_cap": 2.0}
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(), **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 0)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))


def test_two_threads_get_equal_results():
    expected = value_and_gradients(*arrays(), is_causal=True)
    results: list[list[np.ndarray]] = []

    def run() -> None:
        with attn_dispatch.target("gfx942"):  # settings hold in the thread that makes them
            for _ in range(5):
                results.append(value_and_gradients(*arrays(), is_causal=True))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 10
    for got in results:
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y)
