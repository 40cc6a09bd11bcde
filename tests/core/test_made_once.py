"""Arrays of a mask: made outside of loops over layers, and kept whatever jax.checkpoint keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.made_once import made_once
from attn_dispatch.core.mask_arrays import MaskArrays, mask_arrays
from attn_dispatch.semantics.interval_plan import MaskPlan, PlanTiles
from attn_dispatch.semantics.tile_lists import TileSizes
from tests.support.interval_calls import dense
from tests.support.option_parts import options_with

BATCH, TOKENS, LAYERS = 2, 16, 3
TILES = PlanTiles(TileSizes(4, 4), TileSizes(8, 4))
IDS = jnp.asarray([[1] * 7 + [2] * 9, [1] * 3 + [2] * 3 + [3] * 10], jnp.int32)
WEIGHTS = jnp.ones((LAYERS, 1, 1), jnp.float32) / 2
X = jnp.asarray(np.random.RandomState(0).rand(BATCH, TOKENS, 1), jnp.float32)


def spec_of(ids: jax.Array, batch: int = BATCH) -> AttentionSpec:
    shape = jax.ShapeDtypeStruct((batch, TOKENS, 1, 1), jnp.float32)
    given = {"query": shape, "key": shape, "value": shape}
    given |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    facts = {"is_causal": True, "max_segments": 4, "same_lengths": True}
    return AttentionSpec.of(list(given.values()), options_with(given, **facts))


def arrays_of(ids: jax.Array, *, has_backward: bool = True) -> MaskArrays:
    operands = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return mask_arrays(spec_of(ids, len(ids)), operands, TILES, has_backward=has_backward)


def pairs(rows: jax.Array, lists: tuple[jax.Array, ...]) -> jax.Array:
    """The mask as a kernel sees it, float32 [B, T, S]; it needs every array of the lists."""
    places = jnp.arange(TOKENS)
    a, length_a, b, length_b = (rows[..., i : i + 1] for i in range(4))
    may = ((places >= a) & (places < a + length_a)) | ((places >= b) & (places < b + length_b))
    read = jnp.stack([x.sum() for x in lists])
    return may + 0.0 * read.sum().astype(jnp.float32)


@jax.custom_vjp
def kernel(x: jax.Array, mask: dict[str, Any]) -> jax.Array:
    return pairs(mask["rows"], mask["forward"]) @ x


def forward(x: jax.Array, mask: dict[str, Any]) -> Any:
    return kernel(x, mask), mask


def backward(mask: dict[str, Any], grad: jax.Array) -> Any:
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), mask)
    return pairs(mask["rows"], mask["backward"]).swapaxes(1, 2) @ grad, zeros


kernel.defvjp(forward, backward)


def layer(x: jax.Array, weight: jax.Array, ids: jax.Array) -> jax.Array:
    found = arrays_of(ids)
    assert found.backward is not None
    mask = {"forward": found.forward.arrays, "backward": found.backward.arrays}
    return x + jnp.tanh(kernel(x @ weight, {"rows": found.mask, **mask}))


KEEPS = {
    "no remat": lambda f: f,
    "remat": jax.checkpoint,
    "remat, of dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "remat twice": lambda f: jax.checkpoint(lambda *x: jax.checkpoint(f)(*x)),
}  # fmt: skip


def loss(weights: jax.Array, x: jax.Array, ids: jax.Array, keep: Callable[..., Any]) -> jax.Array:
    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return keep(layer)(x, weight, ids), None

    return jax.lax.scan(step, x, weights)[0].sum()


def equations(jaxpr: Any, is_in_loop: bool = False) -> Iterator[tuple[Any, bool]]:
    """The equations of a program and its parts, and whether they are inside a loop."""
    for equation in jaxpr.eqns:
        yield equation, is_in_loop
        inside = is_in_loop or equation.primitive.name in ("scan", "while")
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from equations(getattr(part, "jaxpr", part), inside)


def places(function: Callable[..., Any], *arrays: Any) -> Counter[tuple[str, bool]]:
    """How often arrays of each kind are made, and whether inside a loop."""
    program = jax.make_jaxpr(function)(*arrays)
    return Counter(
        (type(equation.params["maker"]).__name__, is_in_loop)
        for equation, is_in_loop in equations(program.jaxpr)
        if equation.primitive.name == "attn_made_once"
    )


@pytest.mark.parametrize("name", KEEPS)
def test_layers_and_directions_share_what_is_made_outside_of_their_loops(name):
    def gradient(weights, x, ids):
        return jax.grad(loss)(weights, x, ids, KEEPS[name])

    assert places(gradient, WEIGHTS, X, IDS) == {("_Mask", False): 1, ("_Lists", False): 2}
    plain = jax.grad(loss)(WEIGHTS, X, IDS, KEEPS["no remat"])
    np.testing.assert_allclose(jax.jit(gradient)(WEIGHTS, X, IDS), plain, rtol=1e-6)


def test_lists_that_nothing_reads_are_not_made():
    def text(*, has_backward: bool) -> str:
        def forward_alone(ids: jax.Array) -> Any:
            return arrays_of(ids, has_backward=has_backward).forward.arrays

        return jax.jit(forward_alone).lower(IDS).as_text()

    assert text(has_backward=True) == text(has_backward=False)


def test_arrays_are_those_of_the_plan():
    operands = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), IDS)
    plan, found = MaskPlan.of(spec_of(IDS), operands, TILES), arrays_of(IDS)
    assert found.backward is not None
    made = (found.mask, *found.forward.arrays, *found.backward.arrays)
    expected = (plan.mask, *plan.forward.arrays, *plan.backward.arrays)
    for x, y in zip(made, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))
    ids = np.asarray(IDS)
    np.testing.assert_array_equal(
        dense(found.mask, TOKENS), (ids[:, :, None] == ids[:, None, :]) & causal
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_arrays(axis):
    ids = jnp.stack([IDS, IDS[::-1], IDS], axis=axis)
    found = jax.vmap(lambda x: arrays_of(x).forward.arrays, in_axes=axis)(ids)
    for number in range(3):
        expected = arrays_of(jnp.take(ids, number, axis=axis)).forward.arrays
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x[number], y)


def test_arrays_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        lambda ids: arrays_of(ids).forward.arrays,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    for x, y in zip(jax.jit(sharded)(IDS), arrays_of(IDS).forward.arrays, strict=True):
        np.testing.assert_array_equal(x, y)


def test_floats_that_a_mask_reads_have_no_gradient():
    def limited(x: jax.Array) -> jax.Array:
        (rows,) = made_once(_Limits(), x)
        return (rows * x).sum()

    x = jnp.asarray([1.5, 2.5])
    assert jax.grad(limited)(x).tolist() == [1.0, 2.0]
    assert jax.grad(jax.checkpoint(limited))(x).tolist() == [1.0, 2.0]
    assert jax.jvp(limited, (x,), (x,))[1].tolist() == 6.5


class _Limits:
    """Whole numbers of floats."""

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return [x.astype(jnp.int32)]
