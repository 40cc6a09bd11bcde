"""Arrays made outside of loops over layers, and kept whatever jax.checkpoint keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attn_dispatch.core.made_once import made_once
from tests.support.made_arrays import KEEPS, places

LAYERS = 3
IDS = jnp.asarray([[1, 1, 1, 2, 2], [1, 2, 2, 3, 3]], jnp.int32)
WEIGHTS = jnp.arange(1.0, LAYERS + 1)
X = jnp.asarray(np.random.RandomState(0).rand(2, 5), jnp.float32)


class Counts:
    """How many places of the row have the same id."""

    def __call__(self, ids: jax.Array) -> list[jax.Array]:
        return [(ids[:, :, None] == ids[:, None]).sum(axis=2, dtype=jnp.int32)]


class Limits:
    """Whole numbers of floats, and the same again."""

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return [x.astype(jnp.int32)] * 2


COUNTS, LIMITS = Counts(), Limits()


def counts(ids: jax.Array) -> jax.Array:
    return made_once(COUNTS, ids)[0]


@pytest.mark.parametrize("name", KEEPS)
def test_layers_share_what_is_made_outside_of_their_loop(name):
    def loss(weights: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jnp.sin(weight * x) * counts(ids)

        def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return KEEPS[name](layer)(x, weight), None

        return jax.lax.scan(step, x, weights)[0].sum()

    assert places(jax.grad(loss), WEIGHTS, X, IDS) == {("Counts", False): 1}
    found = jax.jit(jax.grad(loss))(WEIGHTS, X, IDS)
    with jax.disable_jit():
        np.testing.assert_allclose(found, jax.grad(loss)(WEIGHTS, X, IDS), rtol=2e-5)


def test_arrays_that_nothing_reads_are_not_made():
    def text(*, is_read: bool) -> str:
        def call(x: jax.Array) -> jax.Array:
            made = counts(IDS) if is_read else (counts(IDS), jnp.ones(()))[1]
            return x + made

        return jax.jit(call).lower(jnp.ones(())).as_text()

    assert "compare" in text(is_read=True) and "compare" not in text(is_read=False)


@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_arrays(axis):
    ids = jnp.stack([IDS, IDS[::-1], 0 * IDS], axis=axis)
    found = jax.vmap(counts, in_axes=axis)(ids)
    for number in range(3):
        np.testing.assert_array_equal(found[number], counts(jnp.take(ids, number, axis=axis)))


def test_arrays_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(counts, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(sharded)(IDS), counts(IDS))


def test_floats_that_a_maker_reads_have_no_gradient():
    def limited(x: jax.Array) -> jax.Array:
        limits, _ = made_once(LIMITS, x)
        return (limits * x).sum()

    x = jnp.asarray([1.5, 2.5])
    assert jax.grad(limited)(x).tolist() == [1.0, 2.0]
    assert jax.grad(jax.checkpoint(limited))(x).tolist() == [1.0, 2.0]
    assert jax.jvp(limited, (x,), (x,))[1].tolist() == 6.5


def test_a_maker_of_nothing_is_staged():
    class Ones:
        def __call__(self) -> list[jax.Array]:
            return [jnp.ones(2, jnp.int32)]

    ones: Any = Ones()
    assert places(lambda x: x + made_once(ones)[0], jnp.ones(2)) == {("Ones", False): 1}
