"""The arrays of masks: rows and lists of both directions, real keys, and invalid queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics.invalid_values import invalid_queries
from attn_dispatch.semantics.mask_arrays import MaskArrays, MaskRows
from attn_dispatch.semantics.real_rows import real_rows_by_position
from attn_dispatch.semantics.tile_lists import TileSizes
from tests.support import bits
from tests.support.interval_calls import Draw, IntervalCall, dense
from tests.support.option_parts import spec_with


@pytest.mark.parametrize("has_mask", [False, True])
def test_arrays_have_a_mask_and_the_lists_of_their_direction(has_mask: bool):
    call = IntervalCall("segments", 12, 9, {"max_segments": 4, "is_causal": True})
    arrays = call.draw(Draw(1))
    if has_mask:
        arrays["mask"] = np.random.default_rng(0).random((1, 1, 12, 9)) < 0.8
    spec, operands = call.spec(arrays), {x: jnp.asarray(y) for x, y in arrays.items()}
    forward = MaskArrays.of(spec, operands, TileSizes(4, 3))
    found = forward.rows.mask
    mask = bits.dense(found, 9)[:, 0] if has_mask else dense(found, 9)
    np.testing.assert_array_equal(forward.rows.attends[:, 0], mask.any(axis=2))
    by_tile = mask.reshape(2, 3, 4, 3, 3).any(axis=(2, 4)).sum(axis=2)
    seen = forward.lists.partial_counts + forward.lists.full_counts
    np.testing.assert_array_equal(seen[:, 0], by_tile)
    backward = MaskArrays.of(spec.in_training(("query",))[1], operands, TileSizes(8, 3))
    np.testing.assert_array_equal(backward.rows.mask, found)
    padded = np.pad(mask, ((0, 0), (0, 4), (0, 0)))
    by_tile = padded.reshape(2, 2, 8, 3, 3).any(axis=(2, 4)).sum(axis=1)
    seen = backward.lists.partial_counts + backward.lists.full_counts
    np.testing.assert_array_equal(seen[:, 0], by_tile)


CALLS = (
    IntervalCall("plain", 12, 9, {"is_causal": True}),
    IntervalCall("lengths", 12, 9),
    IntervalCall("segments", 12, 9, {"max_segments": 4}),
    IntervalCall("segments", 9, 12, {"max_segments": 4, "max_seq_lens": (5, 5)}),
    IntervalCall("cu", 9, 12),
    IntervalCall("plain", 9, 12, {}, has_window_array=True),
)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("is_checked", [False, True])
def test_real_keys_and_invalid_queries_are_those_of_other_programs(call, is_checked):
    rng = Draw(0)
    spec = spec_with(call.spec(call.draw(rng)), is_checked=is_checked)

    @jax.jit
    def both(operands: dict[str, jax.Array]) -> tuple[tuple[jax.Array | None, ...], ...]:
        rows = MaskRows.of(spec, operands)
        _, keys = real_rows_by_position(spec, operands)
        keys = None if keys is None else keys[:, None]
        again = MaskRows.from_arrays(spec, rows.arrays)
        return (rows.real_keys, rows.invalid), (keys, invalid_queries(spec, operands)), (
            again.real_keys, again.invalid,
        )  # fmt: skip

    for _ in range(20):
        found, expected, again = both({x: jnp.asarray(y) for x, y in call.draw(rng).items()})
        for x, y, z in zip(found, expected, again, strict=True):
            assert (x is None) == (y is None) == (z is None)
            if x is not None:
                np.testing.assert_array_equal(x, y)
                np.testing.assert_array_equal(x, z)
