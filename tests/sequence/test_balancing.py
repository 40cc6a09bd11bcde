"""Documents, each in zigzag order over the devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import sequence


def test_each_device_holds_an_early_and_a_late_chunk_of_each_document():
    ids = [1] * 4 + [2] * 8 + [0] * 4
    found = sequence.balance(ids, 2)
    first = [0, 3, 4, 5, 10, 11, 12, 13]
    second = [1, 2, 6, 7, 8, 9, 14, 15]
    assert found.parts == 2 and found.tokens.dtype == np.int32
    assert not found.tokens.flags.writeable  # an order that is held by data loaders and programs
    assert found.tokens.tolist() == first + second


def test_ids_in_any_order_ascend_on_each_device():
    ids = np.array([0, 2, 2, 1, 1, 0, 1, 1, 2, 2])
    found = sequence.balance(jnp.asarray(ids), 2)
    assert found.tokens.tolist() == [3, 7, 1, 9, 0, 4, 6, 2, 8, 5]
    assert ids[found.tokens].tolist() == [1, 1, 2, 2, 0] * 2


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_all_devices_have_equal_work_in_every_step(parts: int):
    """In a step every device attends to the keys of one device, its own in the first."""
    rng = np.random.default_rng(parts)
    lengths = 2 * parts * rng.integers(1, 9, (2, 5))
    lengths[1] = lengths[0][::-1]
    ids = np.stack([np.repeat([3, 1, 2, 0, 4], row) for row in lengths])
    found = sequence.balance(ids, parts)
    assert found.parts == parts
    held = found.tokens.reshape(2, parts, -1)
    for row, tokens in zip(ids, held, strict=True):
        is_pair = row[:, None] == row
        is_pair &= (row != 0) & np.tril(np.ones_like(is_pair))
        pairs = np.array([[is_pair[np.ix_(a, b)].sum() for b in tokens] for a in tokens])
        assert {*np.diag(pairs)} == {pairs[0, 0]}
        others = pairs[~np.eye(parts, dtype=bool)]
        assert len({*others}) <= 1
