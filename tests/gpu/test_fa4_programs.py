"""FlashAttention-4 in programs: a scan, remat, threads, a mesh, and unusual sizes."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import attn_dispatch
from attn_dispatch import fa4
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import default_device
from tests.support.flash_programs import assert_close, attend, check_exported, gradients, packed
from tests.support.gpu_programs import arrays, device_bytes_in_use, pool_bytes


@pytest.fixture(autouse=True)
def usable():
    if reason := fa4.unusable_reason(default_device()):
        pytest.skip(reason)


def by_fa4(q, k, v):
    return attend(q, k, v, "fa4")


def packed_by_fa4(q, k, v):
    return packed(q, k, v, "fa4")


@pytest.mark.parametrize("call", [by_fa4, packed_by_fa4])
def test_200_calls_do_not_grow_memory(call, record):
    step, operands = gradients(call), arrays(0)
    for _ in range(20):
        jax.block_until_ready(step(*operands))
    before = device_bytes_in_use() - pool_bytes()
    results = None
    for _ in range(200):
        results = step(*operands)
    jax.block_until_ready(results)
    after = device_bytes_in_use() - pool_bytes()
    record(call=call.__name__, outside_pool_before=before, outside_pool_after=after)
    assert after <= before


def test_a_scan_of_layers_under_remat_agrees_with_xla():
    q, k, v, _ = arrays(1)

    def loss(q, implementation):
        @jax.checkpoint
        def layer(x, _):
            mixed = attend(x, k, v, implementation)
            return (x + packed(mixed, k, v, implementation)).astype(x.dtype), None

        return jax.lax.scan(layer, q, length=3)[0].astype(jnp.float32).sum()

    found = [jax.jit(jax.grad(loss), static_argnums=1)(q, x) for x in ("fa4", "xla")]
    assert_close(*found, tolerance=0.05)


def test_two_implementations_run_forward_and_backward():
    """fa4 comes first for the forward pass, but not for the gradients of grouped heads."""
    q, k, _, _ = arrays(3, b=1, t=8192, n=8, k=2, h=192)
    v, out_grad = k[..., :128], q[..., :128]
    explanation = attn_dispatch.explain(q, k, v, is_causal=True)
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("fa4", "cudnn")
    found = [gradients(lambda *x, y=y: attend(*x, y))(q, k, v, out_grad) for y in (None, "xla")]
    assert_close(*found)


def test_slices_of_stacked_operands_agree_with_xla():
    """As in a scan over layers, calls read slices of one array and write slices of one."""
    operands = [jnp.stack([x, -x, 2 * x]) for x in arrays(6)]

    def each(implementation):
        step = gradients(lambda *x: packed(*x, implementation))
        return jax.jit(lambda *x: jax.lax.scan(lambda _, y: (None, step(*y)), None, x)[1])

    assert_close(each("fa4")(*operands), each("xla")(*operands))


def test_each_thread_gets_its_results():
    step, wrong = gradients(packed_by_fa4), []
    operands = {seed: arrays(seed) for seed in range(4)}
    expected = {seed: np.asarray(step(*x)[0]) for seed, x in operands.items()}

    def run(seed: int) -> None:
        for _ in range(20):
            if not np.array_equal(np.asarray(step(*operands[seed])[0]), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_exported_module_runs_in_a_process_that_registers(tmp_path):
    targets = (fa4.FORWARD_TARGET, fa4.BACKWARD_TARGET, clear_rows.TARGET)
    check_exported(packed_by_fa4, targets, "register_fa4_calls", tmp_path)


def test_a_mesh_of_all_devices_agrees_with_one_device():
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(len(devices), 1), ("data", "model"))
    operands = arrays(7, b=2 * len(devices))
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
    found = gradients(packed_by_fa4)(*(jax.device_put(x, sharding) for x in operands))
    assert_close(found, gradients(packed)(*operands))


@pytest.mark.parametrize(
    "size",
    [
        {"b": 1, "t": 3, "n": 3, "k": 3},
        {"b": 3, "t": 1000, "n": 6, "k": 2, "h": 72},
        {"b": 1, "t": 129, "n": 1, "k": 1, "h": 128},
        {"b": 300, "t": 64, "n": 2, "k": 1, "h": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_unusual_sizes_agree_with_xla(size, with_lengths):
    operands = arrays(2, **size)
    options: dict[str, Any] = {}
    if with_lengths:
        lengths = jnp.arange(size["b"], dtype=jnp.int32) % (size["t"] + 1)
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    found = [
        gradients(lambda *x, name=name: attend(*x, name, **options))(*operands)
        for name in ("fa4", "xla")
    ]
    assert_close(*found)
