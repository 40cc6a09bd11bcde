"""The share of pairs and tiles that a mask_mod lets attend, as explain reports it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import explain, mods
from tests.support.present import present

B, T, S, N = 3, 300, 460, 2
LENGTHS = jnp.array([130, 460, 0])
CALLS: dict[str, dict[str, Any]] = {
    "prefix": {"mask_mod": mods.prefix_lm(jnp.array([7, 200, 0]))},
    "lengths": {"mask_mod": lambda b, n, t, s: s < LENGTHS[b]},
    "lengths, causal": {"mask_mod": lambda b, n, t, s: (s < LENGTHS[b]) & (s <= t)},
    "chunks": {"mask_mod": mods.chunked_window(50)},
    "by head": {"mask_mod": lambda b, n, t, s: (t + s) % (n + 2) == 0, "is_causal": True},
    "bottom right": {
        "mask_mod": lambda b, n, t, s: s % 2 == 0,
        "local_window_size": (40, 20),
        "causal_alignment": "bottom_right",
    },
}


def expected_shares(options: dict[str, Any]) -> tuple[float, float]:
    """The share of pairs that attend, and of pairs in tiles where some pair attends, by NumPy."""
    options = dict(options)
    mask_mod = options.pop("mask_mod")
    b, n, t, s = np.ogrid[:B, :N, :T, :S]
    attends = np.asarray(mask_mod(*map(jnp.asarray, (b, n, t, s))))
    attends = np.broadcast_to(attends, (B, N, T, S)).copy()
    if options.get("is_causal"):
        attends &= s <= t
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        attends &= (s - t - (S - T) >= -left) & (s - t - (S - T) <= right)
    tiles = np.pad(attends, [(0, 0), (0, 0), (0, -T % 128), (0, -S % 128)])
    tiles = tiles.reshape(B, N, -1, 128, tiles.shape[3] // 128, 128).any((3, 5))
    return attends.mean(), tiles.mean()


def explained(options: dict[str, Any], **changes: Any) -> Any:
    q, k = (jax.ShapeDtypeStruct((B, x, N, 64), jnp.bfloat16) for x in (T, S))
    return explain(q, k, k, target="gfx942", **options | changes)


@pytest.mark.parametrize("name", CALLS)
def test_shares_agree_with_numpy(name: str):
    share = explained(CALLS[name]).mask
    assert (share.pairs, share.tiles) == pytest.approx(expected_shares(CALLS[name]), abs=1e-6)
    assert share.pairs <= share.tiles <= share.computed + 1e-6


@pytest.mark.parametrize("length", [2**13, 2**20])
def test_long_calls_are_estimated(length: int):
    q = jax.ShapeDtypeStruct((2, length, 1, 8), jnp.float32)
    share = present(explain(q, q, q, target="gfx942", mask_mod=lambda b, n, t, s: s <= t).mask)
    assert (share.pairs, share.tiles) == pytest.approx((0.5, 0.5), abs=0.02)
    assert share.computed == pytest.approx(0.5, abs=0.02)
    prefix: dict[str, Any] = {"mask_mod": lambda b, n, t, s: (s <= t) | (s < 1000 * b)}
    share = present(explain(q, q, q, target="gfx942", **prefix).mask)
    assert share.pairs == pytest.approx(0.5, abs=0.02) and share.computed == 1
    (query, key) = (jax.ShapeDtypeStruct((2, x, 1, 8), jnp.float32) for x in (1, 10 * length))
    every_other = explain(query, key, key, target="gfx942", mask_mod=lambda b, n, t, s: s % 2 == 0)
    share = present(every_other.mask)
    assert share.pairs == pytest.approx(0.5) and share.tiles == share.computed == 1


def test_an_estimate_says_so_and_is_no_larger_than_what_is_computed():
    q = jax.ShapeDtypeStruct((1, 2**20, 1, 64), jnp.bfloat16)
    share = present(explain(q, q, q, target="gfx942", mask_mod=mods.dilated_window(64, 4)).mask)
    assert share.is_estimate and str(share).startswith("about ")
    assert share.tiles <= share.computed
    few = present(explained(CALLS["chunks"]).mask)
    assert not few.is_estimate and not str(few).startswith("about")


def test_share_that_a_kernel_computes():
    full = explained({"mask_mod": mods.prefix_lm(jnp.array([7, 200, 0]))}).mask
    assert full.computed == 1
    # The 460 keys are four tiles; the three rows need two, four and none of them.
    rows = explained(CALLS["lengths"]).mask
    assert rows.computed == pytest.approx((2 + 4 + 0) / 12)
    with attn_dispatch.rewrites(False):
        assert explained(CALLS["lengths"]).mask.computed == 1
    causal = explained(CALLS["lengths, causal"]).mask
    assert causal.computed == pytest.approx((1 + 2 + 2 + 1 + 2 + 3) / 36)


def test_share_is_in_the_table():
    assert "of the pairs attend" in str(explained(CALLS["prefix"]))


def test_share_is_none_where_values_are_unknown():
    struct = jax.ShapeDtypeStruct((B,), jnp.int32)
    with_struct = explained({}, mask_mod=lambda b, n, t, s, x: s < x[b], mask_mod_args=(struct,))
    packed = explained(CALLS["prefix"], query_segment_ids=np.ones((B, T), int),
                   key_value_segment_ids=np.ones((B, S), int))  # fmt: skip
    lengths = explained(CALLS["prefix"], key_value_seq_lengths=LENGTHS)
    assert with_struct.mask is packed.mask is explained({}).mask is lengths.mask is None

    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        assert explained({"mask_mod": lambda b, n, t, s: s < x[b]}).mask is None
        assert explained(CALLS["lengths"]).mask is not None
        return x

    inside(LENGTHS)


def test_shares_under_x64():
    """Positions stay int32, as when the mask_mod was traced."""
    mask_mod = CALLS["chunks"]["mask_mod"]
    with jax.enable_x64(True):
        mask = explained({"mask_mod": lambda b, n, t, s: mask_mod(b, n, t, s) | (s < 7)}).mask
    b, n, t, s = jnp.ogrid[:1, :1, :T, :S]
    np.testing.assert_allclose(mask.pairs, np.mean(mask_mod(b, n, t, s) | (s < 7)), rtol=1e-6)
