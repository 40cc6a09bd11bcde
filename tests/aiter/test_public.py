"""The public calls with AITER chosen for them: this CPU plays an AMD GPU."""

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
    dropout_mask,
    explain,
    mods,
    paged_attention,
    ragged_dot_product_attention,
)
from attn_dispatch.aiter.arrays import rng_state
from attn_dispatch.core import primitive
from attn_dispatch.core.rewrites import rewrite
from attn_dispatch.devices.target import device_for
from tests.support import aiter_emulated

SLOPES = jnp.linspace(0.1, 1, 4)
TABLE, BIAS = (
    jnp.linspace(-2, 2, math.prod(shape)).reshape(shape).astype(jnp.bfloat16)
    for shape in ((32, 4), (4, 24, 40))
)


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    """Lowering for the CPU is lowering for gfx942, whose kernels the emulator has."""

    def played(platform: str):
        return device_for("rocm" if platform == "cpu" else platform)

    monkeypatch.setattr(primitive, "device_for", played)
    with (
        attn_dispatch.target("gfx942"),
        attn_dispatch.fallback("error"),
        aiter_emulated.arch("gfx942") as emulator,
    ):
        yield emulator


def arrays(t: int = 24, s: int = 40, b: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((b, t, 4, 16), (b, s, 2, 16), (b, s, 2, 16))
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def value_and_gradients(*qkv: jax.Array, **options: Any) -> list[np.ndarray]:
    def call(*qkv):
        return dot_product_attention(*qkv, **options)

    out, pull = jax.vjp(jax.jit(call), *qkv)
    return [np.asarray(x, np.float32) for x in (out, *pull(out))]


def assert_close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0.05, rtol=0.02)


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
def test_agrees_with_xla(emulator, options):
    got = value_and_gradients(*arrays(), **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))
    assert emulator.calls("forward") == 1


_OWN_ALIBI = {"score_mod": lambda x, b, n, t, s: x + SLOPES[n] * (s - t), "is_causal": True}
WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft cap": ("as logits_soft_cap", {"score_mod": mods.soft_cap(2.0), "is_causal": True}),
    "a sum": ("as a bias", {"score_mod": lambda x, b, n, t, s: x + BIAS[n, t, s]}),
    "ALiBi": ("as alibi_slopes", {"score_mod": mods.alibi(SLOPES), "is_causal": True}),
    "ALiBi both ways": ("as alibi_slopes", {"score_mod": mods.alibi(SLOPES)}),
    "ALiBi of one's own": ("as alibi_slopes", _OWN_ALIBI),
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


@pytest.mark.parametrize("name", WORDS)
def test_mods_in_words_that_aiter_has(emulator, name: str):
    """Forwards, and backwards but for the soft cap, of which CK has no gradient."""
    how, options = WORDS[name]
    assert how in str(explain(*arrays(), **options))
    with attn_dispatch.fallback("silent" if "cap" in name else "error"):
        got = value_and_gradients(*arrays(), **options)
    assert emulator.calls("forward") == 1 and emulator.calls("backward") == ("cap" not in name)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))


@pytest.mark.parametrize(
    ("mod", "read"), [(mods.relative_position, TABLE), (mods.alibi, SLOPES)], ids=["T5", "ALiBi"]
)
def test_gradients_of_what_such_mods_read(emulator, mod: Any, read: jax.Array):
    """The gradient of a table follows from the bias's; XLA computes that of slopes."""

    def gradients(implementation: str | None) -> list[np.ndarray]:
        def loss(read, q):
            _, k, v = arrays()
            options: dict[str, Any] = {
                "score_mod": mod(read),
                "is_causal": True,
                "implementation": implementation,
            }
            return (dot_product_attention(q, k, v, **options).astype(jnp.float32) ** 2).sum()

        found = jax.jit(jax.grad(loss, (0, 1)))(read, arrays()[0])
        return [np.asarray(x, np.float32) for x in found]

    got = gradients(None)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    for x, y in zip(got, gradients("xla"), strict=True):
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


def test_the_gradient_through_lse_is_aiters(emulator):
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


def test_traced_segment_ids_that_are_wrong_mean_what_they_mean_to_xla():
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
def test_a_float32_bias_goes_to_the_kernel_where_16_bits_hold_it(emulator, bias, calls):
    def value_and_gradient(bias, implementation=None):
        def call(bias):
            return dot_product_attention(*arrays(), bias=bias, implementation=implementation)

        out, pull = jax.vjp(jax.jit(call), bias)
        return [np.asarray(x, np.float32) for x in (out, *pull(out))]

    with pytest.raises(NotImplementedError, match="bias: AITER needs query's dtype"):
        value_and_gradient(jnp.asarray(bias))  # under fallback("error"): XLA might compute it
    with pytest.raises(NotImplementedError, match="bias: AITER needs query's dtype"):
        value_and_gradient(jnp.asarray(bias), "aiter")
    with attn_dispatch.fallback("warn"):
        with pytest.warns(AttentionFallbackWarning, match="may fall back to xla, .* when it runs"):
            got = value_and_gradient(jnp.asarray(bias))
    assert (emulator.calls("forward"), emulator.calls("backward")) == (calls, calls)
    assert_close(got, value_and_gradient(jnp.asarray(bias), "xla"))


def test_mapped_calls_are_one_call(emulator):
    qkv = [jnp.stack([x, 2 * x, x - 1]) for x in arrays()]
    lengths = jnp.array([[5, 24], [24, 0], [1, 2]])

    def call(q, k, v, lengths):
        return dot_product_attention(q, k, v, query_seq_lengths=lengths)

    got = jax.block_until_ready(jax.vmap(call)(*qkv, lengths))
    assert emulator.calls("forward") == 1
    for i in range(3):
        np.testing.assert_array_equal(got[i], call(*(x[i] for x in qkv), lengths[i]))


def test_mapped_packed_calls(emulator):
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


def test_dropout_is_a_function_of_the_key():
    def call(seed: int):
        options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(seed)}
        return value_and_gradients(*arrays(), **options)

    first, again, other = call(1), call(1), call(2)
    for x, y, z in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert (x != z).mean() > 0.5


def test_dropout_under_jit_takes_the_key_as_an_operand(emulator):
    @jax.jit
    def call(key):
        return dot_product_attention(*arrays(), dropout_rate=0.5, dropout_key=key)

    assert (call(jax.random.key(1)) != call(jax.random.key(2))).any()
    assert emulator.calls("forward") == 2


CAPPED: dict[str, Any] = {
    "logits_soft_cap": 2.0, "dropout_rate": 0.5, "dropout_key": jax.random.key(1)
}  # fmt: skip


@pytest.mark.parametrize("s", [40, 300])
def test_xla_goes_back_under_the_mask_of_aiters_forward_pass(emulator, s):
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(s=s), **CAPPED)
    # One is the call, one reads 96 keys of its mask, and the last would be the call again.
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1 + -(-s // 96), 0)
    keep = dropout_mask(*arrays(s=s), **CAPPED)
    q, k, v = (x.astype(jnp.float32) for x in arrays(s=s))

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        score = 2 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / 4 / 2)
        weight = jnp.where(keep, 2 * jax.nn.softmax(score), 0)
        return jnp.einsum("bnts,bsnh->btnh", weight, v)

    out, pull = jax.vjp(dense, q, k, v)
    assert_close(got, [np.asarray(x) for x in (out, *pull(out))])


def test_a_dropped_call_is_not_begun_if_its_mask_is_too_large_to_tell(emulator, monkeypatch):
    """XLA would not draw the mask of AITER's forward pass again."""
    monkeypatch.setattr(rewrite, "MOST_PAIRS", 2 * 4 * 24 * 40 - 1)
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(), **CAPPED)
        assert (emulator.calls("forward"), emulator.calls("backward")) == (0, 0)
        dot_product_attention(*arrays(), **CAPPED)
    assert emulator.calls("forward") == 0  # nor is it where it is not differentiated
    assert_close(got, value_and_gradients(*arrays(), **CAPPED, implementation="xla"))


@pytest.mark.filterwarnings("ignore:attention may fall back")
def test_the_mask_of_a_call_whose_bias_is_looked_at_when_it_runs(emulator):
    """Each of the two biases has the mask of whoever computes it."""
    options: dict[str, Any] = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    masks = []
    with attn_dispatch.fallback("warn"):
        for bias in (np.ones((4, 24, 40), np.float32), np.full((4, 24, 40), 0.1, np.float32)):
            masks.append(dropout_mask(*arrays(), bias=bias, **options))
            values = [*arrays()[:2], jnp.ones_like(arrays()[2])]
            out = dot_product_attention(*values, bias=bias, **options)
            dead = ~masks[-1].any(axis=3)
            assert not np.asarray(out)[np.asarray(dead.swapaxes(1, 2))].any()
    assert (masks[0] != masks[1]).any()
    xlas = dropout_mask(*arrays(), **options, implementation="xla")
    np.testing.assert_array_equal(masks[1], xlas)


@pytest.mark.parametrize("rate", [0.99, 0.999, 0.9999999])
def test_a_rate_that_8_bits_do_not_hold_is_refused(rate):
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)}
    with pytest.raises(NotImplementedError, match="CK decides with 8 bits"):
        dot_product_attention(*arrays(), **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_dropout_mask_is_read_from_what_aiter_computes(emulator, rate, dtype):
    """Its keys are more than one call tells of: 6 for each of the 16 columns of value."""
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)}
    qkv = [x.astype(dtype) for x in arrays(s=1000)]
    spec = explain(*qkv, **options).call
    key = {"dropout_key": jax.random.key_data(options["dropout_key"])[None]}
    words = np.asarray(rng_state(spec, key)).view(np.uint64)
    drawn = emulator.keep(tuple(map(int, words)), rate, (2, 4, 24, 1000))
    for further in ({}, {"alibi_slopes": jnp.arange(4.0)}, {"sinks": jnp.arange(4.0) * 30}):
        np.testing.assert_array_equal(dropout_mask(*qkv, **options, **further), drawn)


def test_deterministic_calls_are_bit_equal():
    first = value_and_gradients(*arrays(s=300), deterministic_backward=True)
    for x, y in zip(
        first, value_and_gradients(*arrays(s=300), deterministic_backward=True), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def test_what_speaks_against_a_call_without_its_sinks_is_said():
    slopes = sinks = jnp.zeros(4)
    expected = r"(?s)falls back to xla.*aiter:\n    - logits_soft_cap together with bias or"
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
def test_what_aiter_runs_rewritten(emulator, options: dict[str, Any]):
    options = dict(options)
    operands = arrays(b=options.pop("b", 2))
    got = value_and_gradients(*operands, **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    assert_close(got, value_and_gradients(*operands, **options, implementation="xla"))
    assert emulator.calls("forward") == 1


def test_the_gradient_of_slopes_is_xlas_and_the_others_are_aiters(emulator):
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


def test_the_gradient_that_aiter_lacks_is_xlas(emulator):
    options = {"logits_soft_cap": 2.0}
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(), **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 0)
    assert_close(got, value_and_gradients(*arrays(), **options, implementation="xla"))


def test_two_threads_at_once():
    expected = value_and_gradients(*arrays(), is_causal=True)
    results: list[list[np.ndarray]] = []

    def run() -> None:
        with attn_dispatch.target("gfx942"):  # a setting of the thread that makes it
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


def pages(t: int, *, page: int = 128, h: int = 16) -> tuple[list[jax.Array], jax.Array]:
    """query, pages, table and lengths of three rows; NaN in all that is of no row."""
    rng = np.random.default_rng(t + page)
    table = rng.permutation(11)[:9].reshape(3, 3)
    lengths = np.array([2 * page + 7, 0, page])
    pools = np.full((2, 11, page, 2, h), np.nan)
    for row, length in enumerate(lengths):
        for s in range(length):
            pools[:, table[row, s // page], s % page] = rng.standard_normal((2, 2, h))
    table[1], table[2, 1:] = 2**30, -5
    query = rng.standard_normal((3, t, 4, h))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query, *pools)]
    return [*arrays, jnp.asarray(table)], jnp.asarray(lengths)


PAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "decoding": (1, {}),
    "few queries": (4, {}),
    "a chunk of a prompt": (20, {}),
    "chunks of different lengths": (20, {"query_seq_lengths": np.array([20, 3, 11])}),
    "not causal": (5, {"is_causal": False}),
    "window": (12, {"local_window_size": (200, 0)}),
    "small window": (1, {"local_window_size": (20, 0)}),
    "soft cap": (1, {"logits_soft_cap": 2.0}),
    "soft cap of few": (5, {"logits_soft_cap": 2.0}),
    "ALiBi": (3, {"alibi_slopes": SLOPES}),
    "sinks": (1, {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)}),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages_are_read_where_they_lie(emulator, name: str):
    t, options = PAGED[name]
    arrays, lengths = pages(t)
    call = jax.jit(partial(paged_attention, return_lse=True, **options))
    got = jax.block_until_ready(call(*arrays, lengths))
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 0)
    with attn_dispatch.fallback("silent"):
        expected = paged_attention(
            *arrays, lengths, return_lse=True, implementation="xla", **options
        )
    assert_close(*([np.asarray(x, np.float32) for x in y] for y in (got, expected)))
    assert emulator.calls("split_kv") == 1
    is_read = emulator.last_call("split_kv").page_size == 128
    assert is_read == (name != "small window")  # of which the keys are copied


def test_pages_of_sixteen_are_gathered(emulator):
    arrays, lengths = pages(1, page=16)
    got = jax.block_until_ready(paged_attention(*arrays, lengths))
    assert emulator.calls("split_kv") == 1
    assert emulator.last_call("split_kv").page_size == 0
    expected = paged_attention(*arrays, lengths, implementation="xla")
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])


def test_queries_without_a_batch_axis(emulator):
    arrays, lengths = pages(8)
    query = arrays[0].reshape(24, 4, 16)
    cu_seqlens: dict[str, Any] = {"cu_seqlens_q": jnp.array([0, 9, 9, 20]), "max_seqlen_q": 11}
    got = jax.block_until_ready(paged_attention(query, *arrays[1:], lengths, **cu_seqlens))
    assert emulator.calls("split_kv") == 1
    expected = paged_attention(query, *arrays[1:], lengths, **cu_seqlens, implementation="xla")
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])
    assert not np.asarray(got[20:]).any()


def test_a_page_that_is_not_there_and_wrong_lengths_are_nan():
    arrays, lengths = pages(1)
    arrays[3] = arrays[3].at[2, 0].set(11)
    got = jax.jit(paged_attention)(*arrays, lengths.at[1].set(385))
    assert np.isnan(np.asarray(got, np.float32)).all(axis=(1, 2, 3)).tolist() == [False, True, True]


@pytest.mark.parametrize("t", [1, 3, 8])
def test_a_cache_of_each_row(emulator, t: int):
    """Without lengths of keys a call is none of decoding."""
    q, k, v = arrays(t=t, s=300)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    lengths = jnp.array([3, 300])
    k, v = (x.at[0, 3:].set(jnp.nan) for x in (k, v))
    got = dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **options)
    jax.block_until_ready(got)
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 0)
    expected = dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, **options, implementation="xla"
    )
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])
    jax.block_until_ready(dot_product_attention(q, *arrays(t=t, s=300)[1:], **options))
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 1)
