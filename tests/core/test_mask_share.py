"""What explain says of a mask_mod: the shares of pairs and tiles."""

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


def shares(options: dict[str, Any]) -> tuple[float, float]:
    """Of pairs, and of those in tiles that have one, written out."""
    options = dict(options)
    mask_mod = options.pop("mask_mod")
    b, n, t, s = np.ogrid[:B, :N, :T, :S]
    may = np.asarray(mask_mod(*map(jnp.asarray, (b, n, t, s))))
    may = np.broadcast_to(may, (B, N, T, S)).copy()
    if options.get("is_causal"):
        may &= s <= t
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        may &= (s - t - (S - T) >= -left) & (s - t - (S - T) <= right)
    tiles = np.pad(may, [(0, 0), (0, 0), (0, -T % 128), (0, -S % 128)])
    tiles = tiles.reshape(B, N, -1, 128, tiles.shape[3] // 128, 128).any((3, 5))
    return may.mean(), tiles.mean()


def found(options: dict[str, Any], **changes: Any) -> Any:
    q, k = (jax.ShapeDtypeStruct((B, x, N, 64), jnp.bfloat16) for x in (T, S))
    return explain(q, k, k, target="gfx942", **options | changes)


@pytest.mark.parametrize("name", CALLS)
def test_shares(name: str):
    share = found(CALLS[name]).mask
    assert (share.pairs, share.tiles) == pytest.approx(shares(CALLS[name]), abs=1e-6)
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
    (one, key) = (jax.ShapeDtypeStruct((2, x, 1, 8), jnp.float32) for x in (1, 10 * length))
    share = present(
        explain(one, key, key, target="gfx942", mask_mod=lambda b, n, t, s: s % 2 == 0).mask
    )
    assert share.pairs == pytest.approx(0.5) and share.tiles == share.computed == 1


def test_what_a_kernel_computes():
    full = found({"mask_mod": mods.prefix_lm(jnp.array([7, 200, 0]))}).mask
    assert full.computed == 1
    # Tiles of four for 460 keys: two of them, all and none.
    rows = found(CALLS["lengths"]).mask
    assert rows.computed == pytest.approx((2 + 4 + 0) / 12)
    with attn_dispatch.rewrites(False):
        assert found(CALLS["lengths"]).mask.computed == 1
    causal = found(CALLS["lengths, causal"]).mask
    assert causal.computed == pytest.approx((1 + 2 + 2 + 1 + 2 + 3) / 36)


def test_it_is_in_the_table():
    assert "of the pairs attend" in str(found(CALLS["prefix"]))


def test_what_is_not_known():
    struct = jax.ShapeDtypeStruct((B,), jnp.int32)
    with_struct = found({}, mask_mod=lambda b, n, t, s, x: s < x[b], mask_mod_args=(struct,))
    packed = found(CALLS["prefix"], query_segment_ids=np.ones((B, T), int),
                   key_value_segment_ids=np.ones((B, S), int))  # fmt: skip
    lengths = found(CALLS["prefix"], key_value_seq_lengths=LENGTHS)
    assert with_struct.mask is packed.mask is found({}).mask is lengths.mask is None

    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        assert found({"mask_mod": lambda b, n, t, s: s < x[b]}).mask is None
        assert found(CALLS["lengths"]).mask is not None
        return x

    inside(LENGTHS)


def test_under_x64():
    """Places stay int32, as the mask_mod was traced."""
    mask_mod = CALLS["chunks"]["mask_mod"]
    with jax.enable_x64(True):
        mask = found({"mask_mod": lambda b, n, t, s: mask_mod(b, n, t, s) | (s < 7)}).mask
    b, n, t, s = jnp.ogrid[:1, :1, :T, :S]
    np.testing.assert_allclose(mask.pairs, np.mean(mask_mod(b, n, t, s) | (s < 7)), rtol=1e-6)
