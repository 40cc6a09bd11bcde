"""Sequences put into the order of devices and back, in NumPy and JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention, sequence
from tests.support.module_report import report_of

IDS = np.array([[1] * 8 + [2] * 16, [1] * 8 + [2] * 8 + [0] * 8])
DOCUMENTS = sequence.balance(IDS, 4)
ORDERS = ["zigzag", "contiguous", DOCUMENTS, sequence.balance(IDS[1], 4)]
NAMES = ["zigzag", "contiguous", "documents of rows", "documents"]
each_order = pytest.mark.parametrize("order", ORDERS, ids=NAMES)


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    got = sequence.reorder(np.arange(24)[None], 3)
    expected = [0, 1, 2, 3, 20, 21, 22, 23, 4, 5, 6, 7, 16, 17, 18, 19, *range(8, 16)]
    assert isinstance(got, np.ndarray) and got.tolist() == [expected]


@each_order
@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_restore_undoes_reorder(order, axis: int, asarray):
    x = asarray(np.random.default_rng(0).standard_normal((2, 24, 24), np.float32))
    there = sequence.reorder(x, 4, order=order, axis=axis)
    back = sequence.restore(there, 4, order=order, axis=axis)
    assert type(there) is type(back) is type(x) and there.dtype == x.dtype
    np.testing.assert_array_equal(back, x)
    assert (order == "contiguous") == np.array_equal(there, x)


@each_order
def test_positions_are_the_reordered_numbers(order):
    numbers = np.broadcast_to(np.arange(24), (2, 24))
    got = sequence.positions(24, 4, order=order)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(
        np.broadcast_to(got, (2, 24)), sequence.reorder(numbers, 4, order=order)
    )


@each_order
def test_positions_of_one_device_are_its_rows(order):
    """vmap's axis stands for the devices."""
    f = partial(sequence.positions, 24, 4, order=order, axis_name="cp")
    got = jax.vmap(lambda _: f(), axis_name="cp")(jnp.zeros(4))
    expected = np.split(sequence.positions(24, 4, order=order), 4, axis=-1)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == jnp.int32


@each_order
def test_gradients_go_back_in_order(order):
    weights = np.random.default_rng(0).standard_normal((2, 24, 3), np.float32)

    @jax.jit
    @jax.grad
    def gradient(x):
        return (sequence.reorder(x, 4, order=order) * weights).sum()

    got = gradient(jnp.ones((2, 24, 3)))
    np.testing.assert_array_equal(got, sequence.restore(weights, 4, order=order))


def test_attention_in_the_order_of_documents_is_that_in_order():
    """Positions as arguments of a mask_mod say what the order means."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 24, 2, 8), np.float32) for _ in range(3))
    expected = dot_product_attention(
        q, k, v, query_segment_ids=IDS, key_value_segment_ids=IDS, is_causal=True
    )
    places = sequence.positions(24, 4, order=DOCUMENTS)
    ids = sequence.reorder(IDS, 4, order=DOCUMENTS)
    mask = (places[:, :, None] >= places[:, None]) & (ids[:, :, None] == ids[:, None])
    mask &= ids[:, None] != 0
    q, k, v = (sequence.reorder(x, 4, order=DOCUMENTS) for x in (q, k, v))
    out = dot_product_attention(q, k, v, mask=mask[:, None])
    got = sequence.restore(out, 4, order=DOCUMENTS)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_positions_inside_a_shard_map():
    mesh = jax.make_mesh((1,), ("cp",))
    f = partial(sequence.positions, 8, 1, axis_name="cp")
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("cp")))()
    assert got.tolist() == list(range(8))


def test_sharded_arrays_stay_sharded():
    """Auto axes do not say how the result of a gather is sharded."""
    found = report_of("tests.sequence.orders_on_meshes", devices=8)
    assert len(found) == 12 and all(x["is_right"] for x in found.values()), found
    assert [x for x, y in found.items() if not y["is_sharded"]] == [
        "Auto documents reorder", "Auto documents restore",
    ]  # fmt: skip
    for kind in ("Auto", "Explicit"):
        for name in ("reorder", "restore"):
            zigzag, same = (found[f"{kind} {x} {name}"] for x in ("zigzag", "contiguous"))
            assert zigzag["collectives"] == ["collective-permute"]
            assert same["collectives"] == []
