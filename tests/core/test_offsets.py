"""causal_alignment as a number: what it means, what it becomes, and which kernels take it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, ragged_dot_product_attention
from attn_dispatch.call.spec import AttentionSpec
from tests.support import attention_in_numpy as in_numpy

Pair = tuple[int | None, int | None]

B, N, K, H = 2, 4, 2, 8


def drawn(seed: int, t: int, s: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (B, t, N, H), (B, s, K, H), (B, s, K, H)
    return tuple(rng.standard_normal(x).astype(np.float32) for x in shapes)


def exact(
    arrays: tuple[np.ndarray, ...],
    offsets: Any,
    *,
    is_causal: bool = False,
    local_window_size: Pair = (None, None),
    slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse [B, T, N] in float64, a pair at a time."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    t, s = q.shape[1], k.shape[1]
    score = in_numpy.across(q, k) / np.sqrt(H)
    level = np.arange(t)[None, :] + np.broadcast_to(offsets, (B,))[:, None]
    away = (np.arange(s) - level[..., None])[:, None]  # [B, 1, T, S]
    if slopes is not None:
        score -= slopes[:, None, None] * abs(away)
    left, right = local_window_size
    sees = np.full_like(away, True, dtype=bool)
    for is_hidden in (
        away > 0 if is_causal else False,
        away < -left if left is not None else False,
        away > right if right is not None else False,
    ):
        sees &= ~np.asarray(is_hidden)
    weights, lse = in_numpy.softmax(np.where(sees, score, -np.inf))
    return in_numpy.applied(weights, v), lse.swapaxes(1, 2)


def options_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    sides = [None, 0, 1, 3, 6, 2**40]
    options: dict[str, Any] = {"is_causal": seed % 3 != 0}
    if seed % 2:
        options["local_window_size"] = tuple(sides[rng.integers(6)] for _ in range(2))
    return options


def check(got: Any, expected: Any, **tolerance: float) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, **{"atol": 3e-6, "rtol": 1e-5, **tolerance})


SHAPES = ((7, 12), (12, 7), (1, 9), (9, 1), (6, 6))


@pytest.mark.parametrize("seed", range(20))
def test_offsets_agree_with_a_loop_over_pairs(seed: int):
    t, s = SHAPES[seed % len(SHAPES)]
    arrays, options, traced = drawn(seed, t, s), options_of(seed), []
    slopes = np.linspace(0.1, 1, N).astype(np.float32) if seed % 4 == 1 else None

    def attend(offset: Any) -> Any:
        return dot_product_attention(
            *arrays, causal_alignment=offset, alibi_slopes=slopes, return_lse=True, **options
        )

    @jax.jit
    def call(offset: jax.Array) -> Any:
        traced.append(offset)
        return attend(offset)

    for offset in (-s - 3, -4, -1, 0, 2, s - t, s - 1, s + 5):
        expected = exact(arrays, offset, slopes=slopes, **options)
        check(attend(offset), expected)
        check(call(jnp.int32(offset)), expected)
    assert len(traced) == 1
    for rows in ([3, -2], [s - t, s + 2]):
        check(attend(np.array(rows)), exact(arrays, rows, slopes=slopes, **options))


def test_far_offsets_neither_overflow_nor_wrap():
    arrays = drawn(0, 5, 6)
    for options in ({"is_causal": True}, {"local_window_size": (2**40, 2)}):
        for offset in (2**29, 2**31 - 1, -(2**29), -(2**31), 2**63, -(10**30)):
            near = 100 if offset > 0 else -100
            got = dot_product_attention(
                *arrays, causal_alignment=offset, return_lse=True, **options
            )
            check(got, exact(arrays, near, **options))
            if abs(offset) < 2**32:
                held = jnp.int32(np.clip(offset, -(2**31), 2**31 - 1))
                got = jax.jit(
                    lambda x, o=options: dot_product_attention(
                        *arrays, causal_alignment=x, return_lse=True, **o
                    )
                )(held)
                check(got, exact(arrays, near, **options))


def test_rows_before_all_keys_attend_nothing():
    arrays = drawn(1, 6, 4)

    def call(q: Any, k: Any, v: Any, offset: Any) -> Any:
        out, lse = dot_product_attention(
            q, k, v, is_causal=True, causal_alignment=offset, return_lse=True
        )
        return out.sum(), (out, lse)

    for offset in (-3, jnp.int32(-3)):
        grads, (out, lse) = jax.grad(call, (0, 1, 2), has_aux=True)(*arrays, offset)
        assert (np.asarray(out)[:, :3] == 0).all() and np.isneginf(np.asarray(lse)[:, :3]).all()
        assert (np.asarray(grads[0])[:, :3] == 0).all()
        assert np.isfinite(np.asarray(lse)[:, 3:]).all()
        assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_are_those_of_a_mask(seed: int):
    t, s = SHAPES[seed % len(SHAPES)]
    arrays, options = drawn(seed, t, s), options_of(seed)
    window: Pair = options.get("local_window_size", (None, None))
    offset = (-2, 3, s - t, s)[seed % 4]
    away = np.arange(s)[None, :] - np.arange(t)[:, None] - offset
    mask = np.ones((t, s), bool)
    mask &= away <= 0 if options["is_causal"] else True
    mask &= True if window[0] is None else away >= -window[0]
    mask &= True if window[1] is None else away <= window[1]

    def loss(*arrays: Any, **more: Any) -> Any:
        out, lse = dot_product_attention(*arrays, return_lse=True, **more)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    expected = jax.grad(loss, (0, 1, 2))(*arrays, mask=mask)
    got = jax.grad(loss, (0, 1, 2))(*arrays, causal_alignment=offset, **options)
    check(got, expected, atol=1e-5)
    traced = jax.jit(lambda x: jax.grad(loss, (0, 1, 2))(*arrays, causal_alignment=x, **options))
    check(traced(jnp.int32(offset)), expected, atol=1e-5)


def test_offset_in_scan_and_vmap():
    arrays, offsets = drawn(3, 5, 11), np.array([-2, 0, 3, 6, 9])

    def attend(offset: Any) -> Any:
        return dot_product_attention(
            *arrays, is_causal=True, local_window_size=(4, None), causal_alignment=offset,
            return_lse=True,
        )  # fmt: skip

    scanned = jax.lax.scan(lambda c, x: (c, attend(x)), 0, offsets)[1]
    mapped = jax.vmap(attend)(offsets)
    of_rows = jax.vmap(attend)(np.stack([offsets, offsets + 1], axis=1))
    for i, offset in enumerate(offsets.tolist()):
        expected = exact(arrays, offset, is_causal=True, local_window_size=(4, None))
        check([x[i] for x in scanned], expected)
        check([x[i] for x in mapped], expected)
        rows = [offset, offset + 1]
        check(
            [x[i] for x in of_rows],
            exact(arrays, rows, is_causal=True, local_window_size=(4, None)),
        )
    own = jax.vmap(lambda q, o: dot_product_attention(q, q, q, is_causal=True, causal_alignment=o))(
        arrays[0], np.array([1, -1])
    )
    for row, offset in enumerate((1, -1)):
        q = arrays[0][row]
        expected = dot_product_attention(q, q, q, is_causal=True, causal_alignment=offset)
        check([own[row]], [expected])


def test_lengths_do_not_move_it_and_segments_count_it_from_their_start():
    q, k, v = drawn(4, 6, 9)
    options: dict[str, Any] = {"is_causal": True, "return_lse": True}
    got = dot_product_attention(
        q, k, v, causal_alignment=2, query_seq_lengths=[6, 6], key_value_seq_lengths=[5, 9],
        **options,
    )  # fmt: skip
    first = dot_product_attention(q[:1], k[:1, :5], v[:1, :5], causal_alignment=2, **options)
    check([x[:1] for x in got], first)
    check([x[1:] for x in got], [x[1:] for x in exact((q, k, v), 2, is_causal=True)])

    ragged = ragged_dot_product_attention(
        q[0], k[0], v[0], cu_seqlens_q=[0, 2, 6], cu_seqlens_kv=[0, 5, 9], max_seqlen_q=4,
        max_seqlen_kv=5, causal_alignment=jnp.int32(1), **options,
    )  # fmt: skip
    for queries, keys in ((slice(0, 2), slice(0, 5)), (slice(2, 6), slice(5, 9))):
        expected = dot_product_attention(
            q[:1, queries], k[:1, keys], v[:1, keys], causal_alignment=1, **options
        )
        check([x[queries] for x in ragged], [x[0] for x in expected])


def call_of(offset: Any, t: int = 128, s: int = 256, **more: Any) -> AttentionSpec:
    q, k = (jax.ShapeDtypeStruct((2, x, 2, 64), jnp.bfloat16) for x in (t, s))
    return explain(q, k, k, causal_alignment=offset, target="sm90", **more).call


def test_normal_form():
    struct = jax.ShapeDtypeStruct((2,), jnp.int32)

    def form(offset: Any, **more: Any) -> tuple[Any, ...]:
        meaning = call_of(offset, **{"is_causal": True, **more}).meaning
        return meaning.causal_alignment, meaning.causal_offset, meaning.is_causal, meaning.window

    assert form(0) == ("top_left", 0, True, (None, None))
    assert form(np.int64(128)) == ("bottom_right", 0, True, (None, None))
    lengths = np.array([3, 4])
    assert form(128, key_value_seq_lengths=lengths)[:2] == ("by_offset", 128)
    assert form(7) == ("by_offset", 7, True, (None, None))
    # Nothing is hidden, or nothing counts from the diagonal.
    assert form(255) == ("top_left", 0, False, (None, None))
    assert form(255, local_window_size=(500, None)) == ("top_left", 0, False, (None, None))
    assert form(255, local_window_size=(5, None)) == ("by_offset", 255, False, (5, None))
    assert form(9, is_causal=False) == ("top_left", 0, False, (None, None))
    assert not call_of(struct).has("causal_offset")
    traced = call_of(struct, is_causal=True)
    assert traced.shape("causal_offset") == (2,) and "by_offset" in str(traced)
    shared = call_of(jax.ShapeDtypeStruct((), jnp.int8), is_causal=True)
    assert shared.shape("causal_offset") == (1,)


def test_derivatives_of_any_mode_and_symbolic_lengths():
    q, k, _ = drawn(5, 5, 7)
    mask = np.arange(7)[None, :] - np.arange(5)[:, None]
    mask = (mask <= 2) & (mask >= -1)
    window: dict[str, Any] = {"is_causal": True, "local_window_size": (3, None)}

    def by_offset(q: Any, k: Any, offset: Any = 2) -> Any:
        return dot_product_attention(q, k, k, causal_alignment=offset, **window)

    def by_mask(q: Any, k: Any) -> Any:
        return dot_product_attention(q, k, k, mask=mask)

    def of_gradient(call: Any) -> Any:
        return jax.jvp(jax.grad(lambda q: (call(q, k) ** 2).sum()), (q,), (q,))

    moved = (q, k), (np.ones_like(q), k / 2)
    traced = jax.jit(lambda *x: jax.jvp(lambda q, k: by_offset(q, k, jnp.int32(2)), *x))
    check(traced(*moved), jax.jvp(by_mask, *moved), atol=1e-5)
    check(of_gradient(by_offset), of_gradient(by_mask), atol=1e-4, rtol=1e-4)

    b, t, s = jax.export.symbolic_shape("b, t, s")
    structs = [jax.ShapeDtypeStruct((b, x, n, H), jnp.float32) for x, n in ((t, N), (s, K))]
    for call, more in ((by_offset, ()), (by_offset, (jnp.int32(2),))):
        types = [jax.ShapeDtypeStruct((), jnp.int32) for _ in more]
        exported = jax.export.export(jax.jit(call))(*structs, *types)
        check([exported.call(q, k, *more)], [by_mask(q, k)])
