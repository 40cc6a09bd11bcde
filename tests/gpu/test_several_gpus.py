"""One program on several GPUs, each of which plans, loads and runs a copy."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch import cudnn
from attn_dispatch_tools.reports.environment import cuda_devices
from tests.support.gpu_programs import arrays, step
from tests.support.mesh_programs import (
    LAYOUTS,
    PROGRAMS,
    Program,
    cells,
    make_mesh,
    on_mesh,
    on_one_device,
)
from tests.support.present import present

# With ATTN_DISPATCH_SEVERAL_CPUS=1 and two CPU devices, `-k program` runs the programs on the CPU,
# which checks this file without GPUs.
ON_CPUS = bool(os.environ.get("ATTN_DISPATCH_SEVERAL_CPUS"))
ALL_DEVICES = jax.devices("cpu") if ON_CPUS else cuda_devices()
DEVICES = ALL_DEVICES[:2]

pytestmark = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two NVIDIA GPUs")


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=cuda_devices()[:2])


def assert_close(got, expected) -> None:
    for index, (x, y) in enumerate(zip(got, expected, strict=True)):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # out is computed in a fixed order; gradients add up with atomics.
        assert np.max(np.abs(x - y)) <= (0 if index == 0 else 2e-2 * np.abs(y).max())


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_shard_map_agrees_with_one_gpu(axis, record):
    spec = P(*[None] * axis, "x")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(spec,) * 4, out_specs=(spec,) * 4))
    operands = arrays(0, b=4)
    text = present(sharded.lower(*operands).compile().as_text())
    assert cudnn.FORWARD_TARGET in text and "all-gather" not in text
    for _ in range(10):
        assert_close(sharded(*operands), step(*operands))
    record(axis=axis, devices=2)


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_sharded_arrays_agree_with_one_gpu(axis, record):
    operands = arrays(0, b=4)
    sharding = NamedSharding(mesh(), P(*[None] * axis, "x"))
    sharded = [jax.device_put(x, sharding) for x in operands]
    text = present(step.lower(*sharded).compile().as_text())
    assert cudnn.FORWARD_TARGET in text and "all-gather" not in text
    for _ in range(10):
        assert_close(step(*sharded), step(*operands))
    record(axis=axis, devices=2)


def test_each_gpu_gives_the_same_results(record):
    operands = arrays(0)
    expected = step(*operands)
    for device in cuda_devices()[:2]:
        assert_close(step(*[jax.device_put(x, device) for x in operands]), expected)
    total = sum(jnp.size(x) for x in expected)
    record(devices=2, numbers_compared=total)


def compared(program: Program, mesh: jax.sharding.Mesh, spec: P) -> tuple[float, str]:
    """The largest difference from one GPU, over the largest number, and the program's text."""
    # A kernel's dropout mask depends on the device; XLA's is the same for any number of devices.
    with attn_dispatch.sharded_dropout("same"), attn_dispatch.fallback("silent"):
        attention = attn_dispatch.dot_product_attention
        expected, _ = on_one_device(program, attention, "bfloat16")
        got, compiled = on_mesh(program, mesh, spec, dtype="bfloat16")
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        worst = max(worst, float(np.max(np.abs(x - y)) / np.abs(y).max()))
    return worst, present(compiled.as_text())


SPECS = {"batch": P("x"), "heads": P(None, None, "x"), "sequence": P(None, "x")}


@pytest.mark.filterwarnings("ignore::attn_dispatch.AttentionShardingWarning")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPECS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_agrees_with_one_gpu(name, split, kind, record):
    """The programs are those of docs/bench/meshes.md, in bfloat16.

    Keys of one head that are sharded along their length are gathered, with a warning.
    """
    program = PROGRAMS[name]
    worst, text = compared(program, make_mesh((2,), kind, DEVICES), SPECS[split])
    assert worst <= 2e-2
    # If heads are split in place of the sequence, the gradient of a whole bias is gathered.
    assert split == "sequence" or "all-gather" not in text
    if not program.further_arrays and not program.options and not ON_CPUS:
        assert cudnn.FORWARD_TARGET in text
    record(name=name, split=split, axes=kind, worst=worst, devices=2)


@pytest.mark.filterwarnings("ignore::attn_dispatch.AttentionShardingWarning")
@pytest.mark.skipif(len(ALL_DEVICES) < 4, reason="needs four NVIDIA GPUs")
@pytest.mark.parametrize(("layout", "name", "kind"), [*cells()])
def test_program_of_a_layout_agrees_with_one_gpu(layout, name, kind, record):
    """Layouts and programs are those of docs/bench/meshes.md.

    Four GPUs have half as many along the last axis as eight.
    """
    devices = 8 if len(ALL_DEVICES) >= 8 else 4
    (*rest, last), spec = LAYOUTS[layout]
    mesh = make_mesh((*rest, last * devices // 8), kind, ALL_DEVICES[:devices])
    worst, _ = compared(PROGRAMS[name], mesh, spec)
    assert worst <= 2e-2
    record(layout=layout, name=name, axes=kind, worst=worst, devices=devices)


@pytest.mark.skipif(len(ALL_DEVICES) < 4, reason="needs four NVIDIA GPUs")
def test_program_in_a_shard_map_over_one_axis_agrees_with_one_gpu(record):
    """Rows are split by the shard_map over "cp"; the partitioner splits heads along "model"."""
    mesh = jax.make_mesh(
        (2, 2), ("cp", "model"), axis_types=(AxisType.Auto,) * 2, devices=ALL_DEVICES[:4]
    )

    def attend(q, k, v):
        return attn_dispatch.dot_product_attention(q, k, v, is_causal=True)

    def halves(*operands):
        parts = zip(*(jnp.split(x, 2, axis=1) for x in operands), strict=True)
        return jnp.concatenate([attend(*part) for part in parts], axis=1)

    def both(function):
        def run(q, k, v, out_grad):
            out, pull = jax.vjp(function, q, k, v)
            return out, *pull(out_grad)

        return jax.jit(run)

    rows = P(None, "cp")
    manual = jax.shard_map(
        attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, axis_names={"cp"}
    )
    operands = arrays(0, b=4)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "cp", "model"))) for x in operands]
    compiled = both(manual).lower(*placed).compile()
    if not ON_CPUS:
        text = present(compiled.as_text())
        assert cudnn.FORWARD_TARGET in text and "all-gather" not in text
    for _ in range(10):
        assert_close(compiled(*placed), both(halves)(*operands))
    record(devices=4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("queries", [1, 4])
def test_pool_of_pages_on_two_gpus_agrees_with_one_gpu(queries, kind, record):
    """Each GPU attends to the pages that it holds, by its kernel for pages."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((4, queries, 16, 128)).astype(jnp.bfloat16)
    pool = rng.standard_normal((256, 64, 4, 128)).astype(jnp.bfloat16)
    table = rng.permutation(256).reshape(4, 64).astype(np.int32)
    lengths = np.array([4096, 4001, 70, 0], np.int32)
    attend = jax.jit(partial(attn_dispatch.paged_attention, return_lse=True))
    expected = attend(query, pool, pool, table, lengths)
    over = jax.make_mesh((2,), ("pool",), axis_types=(kind,), devices=DEVICES)
    with jax.set_mesh(over):
        pages = jax.device_put(pool, NamedSharding(over, P("pool")))
        rest = [jax.device_put(x, NamedSharding(over, P())) for x in (query, table, lengths)]
        given = (rest[0], pages, pages, *rest[1:])
        compiled = attend.lower(*given).compile()
        got = compiled(*given)
    text = present(compiled.as_text())
    assert "all-gather" not in text
    assert ON_CPUS or cudnn.FORWARD_TARGET in text
    (out, lse), (of_one, lse_of_one) = (
        [np.asarray(x, np.float32) for x in y] for y in (got, expected)
    )
    assert np.abs(out - of_one).max() <= 2e-2 * np.abs(of_one).max()
    assert np.array_equal(lse == -np.inf, lse_of_one == -np.inf)
    assert np.abs(np.where(lse == -np.inf, 0, lse - np.maximum(lse_of_one, -1e9))).max() <= 1e-3
    record(queries=queries, axes=kind.name, devices=2)


LENGTH = 1024
IDS = np.repeat([1, 2, 3, 0], [500, 300, 200, 24]).astype(np.int32)[None]
LONG_AGO = {"is_causal": True, "local_window_size": (200, 0)}
PACKED = {"query_segment_ids": IDS, "max_segments": 3}
SPREAD = {
    "ring": ("ring", {"is_causal": True}),
    "ring, full, segments": ("ring", PACKED),
    "ring, a segment that is too long": ("ring", PACKED | {"max_segment_len": 400}),
    "gather": ("gather", {"is_causal": True}),
    "gather, lengths": (
        "gather",
        {
            "query_seq_lengths": np.array([700], np.int32),
            "key_value_seq_lengths": np.array([900], np.int32),
        },
    ),
    "halo": ("halo", LONG_AGO),
    "halo, segments": ("halo", LONG_AGO | PACKED),
    "heads, dropout": ("heads", {"dropout_rate": 0.2, "dropout_key": 7}),
}


@pytest.mark.parametrize("name", SPREAD)
def test_spread_sequence_on_two_gpus_agrees_with_one_gpu(name, record):
    """Where a row is NaN, as in a segment that is too long, it is NaN on both."""
    strategy, options = SPREAD[name]
    options = dict(options)
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])
    ids = {x: y for x, y in options.items() if isinstance(y, np.ndarray)}
    rest = {x: y for x, y in options.items() if x not in ids}

    def both(q, k, v, out_grad, traced):
        call = partial(attn_dispatch.dot_product_attention, **rest, **traced)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(out_grad)

    given = arrays(3, b=1, t=LENGTH)
    over = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,), devices=DEVICES)
    rows, whole = NamedSharding(over, P(None, "context")), NamedSharding(over, P())
    with attn_dispatch.sharded_dropout("same"), attn_dispatch.fallback("silent"):
        expected = jax.jit(both)(*given, ids)
        with jax.set_mesh(over), attn_dispatch.context_parallel(strategy):
            placed = [jax.device_put(x, rows) for x in given]
            traced = {x: jax.device_put(y, rows if y.ndim == 2 else whole) for x, y in ids.items()}
            got = jax.jit(both)(*placed, traced)
    worst = 0.0
    for x, y in zip(got, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.array_equal(np.isnan(x), np.isnan(y))
        worst = max(worst, float(np.nanmax(np.abs(x - y)) / np.nanmax(np.abs(y))))
    assert worst <= 2e-2
    record(name=name, worst=worst, devices=2)
