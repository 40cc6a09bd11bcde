"""What explain says of a mask_mod: the shares of pairs and tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import explain, mods
from attn_dispatch.core import mask_share

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
@pytest.mark.parametrize("is_sampled", [False, True])
def test_shares(name: str, is_sampled: bool, monkeypatch: pytest.MonkeyPatch):
    share = found(CALLS[name]).mask
    assert (share.pairs, share.tiles) == pytest.approx(shares(CALLS[name]), abs=1e-6)
    assert share.pairs <= share.tiles <= share.computed + 1e-6
    if is_sampled:
        # Tiles of one row, of one head and batch row, stand for all.
        monkeypatch.setattr(mask_share, "_MOST_PAIRS", S)
        assert 0 <= found(CALLS[name]).mask.pairs <= 1


def test_what_a_kernel_computes():
    full = found({"mask_mod": mods.prefix_lm(jnp.array([7, 200, 0]))}).mask
    assert full.computed == 1
    # Tiles of four for 460 keys: two of them, all and none.
    rows = found(CALLS["lengths"]).mask
    assert rows.computed == pytest.approx((2 + 4 + 0) / 12)
    causal = found(CALLS["lengths, causal"]).mask
    assert causal.computed == pytest.approx((1 + 2 + 2 + 1 + 2 + 3) / 36)


def test_it_is_in_the_table():
    assert "of the pairs attend" in str(found(CALLS["prefix"]))


def test_what_is_not_known():
    struct = jax.ShapeDtypeStruct((B,), jnp.int32)
    with_struct = found({}, mask_mod=lambda b, n, t, s, x: s < x[b], mask_mod_args=(struct,))
    packed = found(CALLS["prefix"], query_segment_ids=np.ones((B, T), int),
                   key_value_segment_ids=np.ones((B, S), int))  # fmt: skip
    assert with_struct.mask is packed.mask is found({}).mask is None

    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        assert found({"mask_mod": lambda b, n, t, s: s < x[b]}).mask is None
        return x

    inside(LENGTHS)
