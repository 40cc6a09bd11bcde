"""Arrays of a mask beside attention calls: bound once, right under every transformation, and
ignored where they are of no use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import (
    dot_product_attention,
    explain_program,
    fa4,
    settings,
    target,
    tuning,
)
from attn_dispatch.core import mask_arrays, primitive
from attn_dispatch.core.rewrites.catalogue import ONE_BY_ONE
from attn_dispatch.core.tuning import contest
from attn_dispatch.fa4 import passes
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch_tools.verify.calls import specs_in
from tests.support import interval_kernels_in_jax
from tests.support.fa4_on_cpu import for_h200, install
from tests.support.made_arrays import KEEPS, places

ROWS = {("_Ranges", False): 1, ("_Rows", False): 1}


def made_for(name: str, lists: int) -> dict[tuple[str, bool], int]:
    """What `places` finds of a call of CALLS: constants, if its mask is a static band."""
    if name in ("causal", "window", "sinks"):
        return {("_BandRows", False): 1, ("_BandLists", False): lists}
    return {**ROWS, ("_Lists", False): lists}


"""What makes the rows of a mask."""
LAYERS, BATCH, TOKENS, HEADS, DIM = 3, 2, 13, 2, 64
RNG = np.random.RandomState(0)
X = jnp.asarray(RNG.randn(BATCH, TOKENS, HEADS, DIM), jnp.float32)
WEIGHTS = jnp.asarray(RNG.randn(LAYERS, 3, DIM, DIM) / 8, jnp.float32)
IDS = jnp.asarray([[1] * 6 + [2] * 5 + [0] * 2, [1] * 3 + [2] * 3 + [3] * 7], jnp.int32)
GROUPS = jnp.asarray([[0, 0, 1, 1, 1, 0, 0, 2, 2, 0, 0, 0, 0]] * BATCH, jnp.int32)
LENGTHS = jnp.asarray([13, 7], jnp.int32)


def attend(x: jax.Array, weight: jax.Array, implementation: str, **options: Any) -> jax.Array:
    q, k, v = jnp.einsum("...h,whd->w...d", x, weight)
    return dot_product_attention(q, k, v, implementation=implementation, **options)


def documents(ids: jax.Array) -> dict[str, Any]:
    same = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return {"is_causal": True, "max_segments": 3, **same}


def prefix(b: Any, n: Any, t: Any, s: Any, length: Any) -> Any:
    return (s <= t) | (s < length[b])


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0)},
    "documents": documents(IDS),
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "sinks": {"is_causal": True, "sinks": jnp.asarray([-0.5, 0.5], jnp.float32)},
    "prefix": {"mask_mod": prefix, "mask_mod_args": (jnp.asarray([4, 9], jnp.int32),)},
}


def layers(x: jax.Array, weights: jax.Array, implementation: str, keep: Any, options: Any) -> Any:
    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
            return x + jnp.tanh(attend(x, weight, implementation, **options))

        return keep(layer)(x, weight), None

    return jax.lax.scan(step, x, weights)[0]


def loss(x: jax.Array, weights: jax.Array, implementation: str, keep: Any, options: Any) -> Any:
    return (layers(x, weights, implementation, keep, options) ** 2).sum()


def gradients(
    implementation: str, options: Any, keep: Any = KEEPS["no remat"]
) -> tuple[jax.Array, jax.Array]:
    def of(x: jax.Array, weights: jax.Array) -> Any:
        return jax.grad(loss, (0, 1))(x, weights, implementation, keep, options)

    return jax.jit(of)(X, WEIGHTS)


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * np.abs(y).max())


@pytest.fixture
def kernels(monkeypatch):
    install(monkeypatch)
    with for_h200():
        yield


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The directions of the calls that make arrays of their own."""
    found: list[str] = []
    of = MaskArrays.of

    def noted(spec, operands, tile):
        found.append("backward" if spec.is_backward else "forward")
        return of(spec, operands, tile)

    monkeypatch.setattr(MaskArrays, "of", staticmethod(noted))
    return found


def test_masks_share_the_programs_of_rows_and_lists(kernels, monkeypatch):
    found: list[str] = []
    rows_of, mask_lists = mask_arrays.rows_of, mask_arrays.mask_lists

    def noted_rows(ranges, queries):
        found.append(f"rows of {len(ranges)}")
        return rows_of(ranges, queries)

    def noted_lists(mask, grid, ends, *, is_backward):
        found.append("backward" if is_backward else "forward")
        return mask_lists(mask, grid, ends, is_backward=is_backward)

    monkeypatch.setattr(mask_arrays, "rows_of", noted_rows)
    monkeypatch.setattr(mask_arrays, "mask_lists", noted_lists)
    x = jax.ShapeDtypeStruct((1, 200, 1, DIM), jnp.float32)  # of which no test has seen a mask

    def lower(**options: Any) -> None:
        def gradient(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: attend(x, WEIGHTS[0], "fa4", **options).sum())(x)

        jax.jit(gradient).lower(x)

    lower(is_causal=True, local_window_size=(30, 0))
    assert found == []
    lower(mask_mod=lambda b, n, t, s: (s <= t) & (t - s < 50) | (s < 9))
    more = len(found)
    assert sorted(found) == ["backward", "forward", "rows of 2"]
    lower(mask_mod=lambda b, n, t, s: (s <= t + 3) & (t - s < 60) | (s < 8))
    assert len(found) == more


def test_a_mask_mod_is_traced_once(kernels):
    calls: list[object] = []

    def mod(b: Any, n: Any, t: Any, s: Any) -> Any:
        calls.append(t)
        return (s <= t) | (s < 5)

    jax.jit(jax.grad(lambda x: attend(x, WEIGHTS[0], "fa4", mask_mod=mod).sum())).lower(X)
    assert len(calls) == 1


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("keep", KEEPS)
def test_layers_share_what_is_made_outside_of_their_loops(kernels, made, name, keep):
    options = CALLS[name]

    def gradient(x, weights):
        return jax.grad(loss, (0, 1))(x, weights, "fa4", KEEPS[keep], options)

    assert places(gradient, X, WEIGHTS) == made_for(name, 2)
    if keep in ("no remat", "remat"):
        assert_close(gradients("fa4", options, KEEPS[keep]), gradients("xla", options))
        assert made == []


def test_calls_without_gradient_make_the_lists_of_one_direction(kernels, made):
    def call(x: jax.Array) -> jax.Array:
        return attend(x, WEIGHTS[0], "fa4", is_causal=True)

    assert places(call, X) == made_for("causal", 1)
    assert_close(jax.jit(call)(X), attend(X, WEIGHTS[0], "xla", is_causal=True))
    assert made == []


def test_invalid_queries_are_nan_and_pass_no_gradient(kernels, made):
    invalid = IDS.at[1, 2].set(9)

    def out(x: jax.Array, ids: jax.Array, implementation: str) -> jax.Array:
        return attend(x, WEIGHTS[0], implementation, **documents(ids))

    def summed(x: jax.Array, ids: jax.Array, implementation: str) -> jax.Array:
        y = out(x, ids, implementation)
        return jnp.where(jnp.isnan(y), 0, y).sum()

    found, expected = (jax.jit(out, static_argnums=2)(X, invalid, x) for x in ("fa4", "xla"))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.isnan(found[1, 2]).all() and not np.isnan(found[0]).any()
    assert_close(jnp.nan_to_num(found), jnp.nan_to_num(expected))
    slopes = (jax.jit(jax.grad(summed), static_argnums=2)(X, invalid, x) for x in ("fa4", "xla"))
    assert_close(*slopes)
    assert made == []


def mapped_calls() -> dict[str, tuple[Any, Any]]:
    """Functions of an implementation's name, x and ids, mapped along some axes, and arrays."""
    xs, ids = jnp.stack([X, X[::-1], 2 * X]), jnp.stack([IDS, IDS[::-1], IDS])

    def by(name: str):
        def one(x: jax.Array, ids: jax.Array) -> jax.Array:
            return attend(x, WEIGHTS[0], name, **documents(ids))

        return one

    def causal(name: str):
        def one(x: jax.Array, ids: jax.Array) -> jax.Array:
            return attend(x, WEIGHTS[0], name, is_causal=True)

        return one

    return {
        "x": (lambda name: jax.vmap(by(name), (0, None)), (xs, IDS)),
        "ids": (lambda name: jax.vmap(by(name), (None, 0)), (X, ids)),
        "both": (lambda name: jax.vmap(by(name), (1, 1)), (xs.swapaxes(0, 1), ids.swapaxes(0, 1))),
        "rows": (lambda name: jax.vmap(by(name)), (X, IDS)),
        "twice": (lambda name: jax.vmap(jax.vmap(by(name)), (0, None)), (xs, IDS)),
        "causal": (lambda name: jax.vmap(causal(name)), (xs, ids)),
    }


MAPPED = mapped_calls()


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_calls(kernels, made, name):
    function, arrays = MAPPED[name]

    def both(implementation: str) -> Any:
        def call(x: jax.Array, ids: jax.Array) -> Any:
            out, pull = jax.vjp(lambda x: function(implementation)(x, ids), x)
            return out, *pull(jnp.cos(out))

        return jax.jit(call)(*arrays)

    assert_close(both("fa4"), both("xla"))

    def each(implementation: str) -> Any:
        def square(x: jax.Array, ids: jax.Array) -> jax.Array:
            return (attend(x, WEIGHTS[0], implementation, **documents(ids)) ** 2).sum()

        return jax.jit(jax.vmap(jax.grad(square)))(X, IDS)

    assert_close(each("fa4"), each("xla"))
    assert made == []


def test_inside_shard_map(kernels, made):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def gradient(implementation: str) -> Any:
        def square(x: jax.Array, ids: jax.Array) -> jax.Array:
            def call(x: jax.Array, ids: jax.Array) -> jax.Array:
                return attend(x, WEIGHTS[0], implementation, **documents(ids))

            sharded = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
            return (sharded(x, ids) ** 2).sum()

        return jax.jit(jax.grad(square))(X, IDS)

    assert_close(gradient("fa4"), gradient("xla"))
    assert made == []


def test_derivatives_by_formulas_ignore_them(kernels, made):
    def by(names: Any) -> Any:
        def call(x: jax.Array) -> jax.Array:
            q, k, v = jnp.einsum("...h,whd->w...d", x, WEIGHTS[0])
            out = dot_product_attention(q, k, v, implementation=names, **documents(IDS))
            return (out**2).sum()

        along = jnp.cos(X)
        tangent = jax.jit(lambda x: jax.jvp(call, (x,), (along,))[1])(X)
        second = jax.jit(lambda x: jax.jvp(jax.grad(call), (x,), (along,))[1])(X)
        return tangent, second

    assert_close(by(["fa4", "xla"]), by("xla"))


def test_transpose_by_value_makes_its_own(kernels, made):
    def by(name: str) -> Any:
        def of_value(v: jax.Array) -> jax.Array:
            return dot_product_attention(X, X, v, implementation=name, **documents(IDS))

        return jax.jit(lambda g: jax.linear_transpose(of_value, X)(g))(jnp.cos(X))

    assert_close(by("fa4"), by("xla"))


@pytest.mark.parametrize("parts", ONE_BY_ONE, ids=str)
def test_rewritten_calls_make_their_own(kernels, made, parts):
    def by(name: str) -> Any:
        def square(x: jax.Array, ids: jax.Array) -> jax.Array:
            return (attend(x, WEIGHTS[0], name, **documents(ids)) ** 2).sum()

        return jax.jit(jax.grad(square))(X, IDS)

    with settings.restored(replace(settings.current(), first_rewrite=parts.name)):
        found = by("fa4")
    assert_close(found, by("xla"))
    assert set(made) == {"forward", "backward"}


def test_arrays_in_other_tiles_are_not_used(kernels, made, monkeypatch):
    call = jax.jit(lambda x: attend(x, WEIGHTS[0], "fa4", is_causal=True)).trace(X)
    tile = fa4._tile

    def doubled(spec, device):
        found = tile(spec, device)
        return type(found)(2 * found.queries, found.keys)

    used: list[MaskArrays] = []
    forward = passes.forward

    def noted(spec, operands, mask, arch):
        used.append(mask)
        return forward(spec, operands, mask, arch)

    monkeypatch.setattr(fa4, "_tile", doubled)
    monkeypatch.setattr(passes, "forward", noted)
    call.lower()
    assert made == ["forward"]
    (mask,) = used
    assert mask.tile.queries == 8


@pytest.mark.parametrize("options", [{}, {"implementation": "xla"}, {"implementation": "cudnn"}])
def test_calls_that_other_implementations_run_have_none(kernels, options):
    def call(x: jax.Array) -> jax.Array:
        return dot_product_attention(x, x, x, bias=jnp.ones((TOKENS, TOKENS)), **options)

    assert places(call, X) == {}


def test_exported_programs(kernels, made, monkeypatch):
    install(monkeypatch, interval_kernels_in_jax)  # no program with a callback can be exported

    def gradient(name: str) -> Any:
        def square(x: jax.Array, ids: jax.Array) -> jax.Array:
            return (attend(x, WEIGHTS[0], name, **documents(ids)) ** 2).sum()

        return jax.jit(jax.grad(square))

    exported = export.export(gradient("fa4"))(X, IDS)
    found = export.deserialize(exported.serialize()).call(X, IDS)
    assert_close(found, gradient("xla")(X, IDS))
    assert made == []


def test_symbolic_batches_have_none(kernels):
    batch, *_ = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, TOKENS, HEADS, DIM), jnp.float32)

    def call(x: jax.Array) -> jax.Array:
        return dot_product_attention(x, x, x, is_causal=True, implementation="fa4")

    assert places(call, x) == {}


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_explained_programs_have_the_same_calls(kernels, monkeypatch, name):
    def explained() -> list[str]:
        def step(x: jax.Array, weights: jax.Array) -> Any:
            return jax.grad(loss)(x, weights, "fa4", KEEPS["remat"], CALLS[name])

        found = explain_program(step, X, WEIGHTS)
        assert len(found.calls) == 1
        return [str(found.calls[0]), *map(str, found.others)]

    bound = explained()
    monkeypatch.setattr(primitive, "tiles_to_bind", lambda options, operands: None)
    assert bound == explained()


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_64_bits_as_the_default(kernels, made, name):
    with jax.enable_x64(True):
        found, expected = (gradients(x, CALLS[name]) for x in ("fa4", "xla"))
    assert_close(found, expected)
    assert made == []


def test_calls_found_in_programs_have_their_operands_alone(kernels):
    def found(implementation: str) -> list[object]:
        def summed(x: jax.Array) -> jax.Array:
            return attend(x, WEIGHTS[0], implementation, **CALLS["prefix"]).sum()

        traced = jax.jit(jax.grad(summed)).trace(X)
        return [spec.operands for spec in specs_in(traced.jaxpr.jaxpr)]

    assert found("fa4") == found("xla")


def test_programs_for_other_devices_have_none(kernels):
    def call(x: jax.Array) -> jax.Array:
        return attend(x, WEIGHTS[0], "fa4", is_causal=True)

    for names in (("cpu",), ("sm80",), ("mi300x",), ("sm90", "mi300x")):
        with target(*names):
            assert places(call, X) == {}
    assert places(call, X) != {}


def test_eager_calls_and_explicit_axes_have_none(kernels, made):
    assert_close(*(attend(X, WEIGHTS[0], name, is_causal=True) for name in ("fa4", "xla")))
    assert made == ["forward"]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    def call(x: jax.Array) -> jax.Array:
        return dot_product_attention(x, x, x, is_causal=True, implementation="fa4")

    with jax.set_mesh(mesh):
        assert places(call, x) == {}


def test_tuning_sees_the_operands_alone(kernels, monkeypatch):
    seen = []
    monkeypatch.setattr(contest, "tune", lambda spec, device: seen.append(spec))
    with tuning(1.0):
        jax.jit(lambda x: attend(x, WEIGHTS[0], "fa4", is_causal=True)).lower(X)
    assert [x.options.operands for x in seen] == [("query", "key", "value")]
