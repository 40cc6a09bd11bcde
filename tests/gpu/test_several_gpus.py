"""One program on several GPUs: each device plans, loads and runs its own copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_runtime import arrays, step

from attn_dispatch import cudnn
from attn_dispatch.conformance.environment import cuda_devices

pytestmark = pytest.mark.skipif(len(cuda_devices()) < 2, reason="needs two NVIDIA GPUs")


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=cuda_devices()[:2])


def assert_close(got, expected) -> None:
    for index, (x, y) in enumerate(zip(got, expected, strict=True)):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # out is computed in a fixed order; gradients add up with atomics.
        assert np.max(np.abs(x - y)) <= (0 if index == 0 else 2e-2 * np.abs(y).max())


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_shard_map(axis, record):
    spec = P(*[None] * axis, "x")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(spec,) * 4, out_specs=(spec,) * 4))
    operands = arrays(0, b=4)
    text = sharded.lower(*operands).compile().as_text()
    assert cudnn.FORWARD_TARGET in text and "all-gather" not in text
    for _ in range(10):
        assert_close(sharded(*operands), step(*operands))
    record(axis=axis, devices=2)


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_jit_with_sharded_arrays(axis, record):
    operands = arrays(0, b=4)
    sharding = NamedSharding(mesh(), P(*[None] * axis, "x"))
    sharded = [jax.device_put(x, sharding) for x in operands]
    text = step.lower(*sharded).compile().as_text()
    assert cudnn.FORWARD_TARGET in text and "all-gather" not in text
    for _ in range(10):
        assert_close(step(*sharded), step(*operands))
    record(axis=axis, devices=2)


def test_each_device_alone(record):
    operands = arrays(0)
    expected = step(*operands)
    for device in cuda_devices()[:2]:
        assert_close(step(*[jax.device_put(x, device) for x in operands]), expected)
    total = sum(jnp.size(x) for x in expected)
    record(devices=2, numbers_compared=total)
