"""FlashAttention's kernels in programs: a scan, remat, threads, exported modules, unusual sizes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import attn_dispatch
from attn_dispatch import fa4, flash
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import default_device
from tests.support.gpu_programs import (
    arrays,
    assert_calls_do_not_grow_memory,
    assert_close,
    attend,
    check_exported,
    gradients,
    packed,
)

MODULES = {"fa4": fa4, "flash": flash}
TARGETS = {
    "fa4": (fa4.FORWARD_TARGET, fa4.BACKWARD_TARGET, clear_rows.TARGET),
    "flash": (*flash.library.TARGETS, *clear_rows.TARGETS),
}
CALLS = {"fa4": 200, "flash": 500}
SIZES = {
    "fa4": (
        {"b": 1, "t": 3, "n": 3, "k": 3},
        {"b": 3, "t": 1000, "n": 6, "k": 2, "h": 72},
        {"b": 1, "t": 129, "n": 1, "k": 1, "h": 128},
        {"b": 300, "t": 64, "n": 2, "k": 1, "h": 32},
    ),
    # With more batch rows than a grid has blocks the backward pass is refused, and XLA's runs.
    "flash": (
        {"b": 70_000, "t": 8, "n": 1, "k": 1},
        {"b": 1, "t": 3, "n": 3, "k": 3},
        {"b": 2, "t": 1, "n": 8, "k": 1, "h": 256},
        {"b": 3, "t": 1000, "n": 6, "k": 3, "h": 72},
    ),
}


def skip_without(kernel: str) -> None:
    """Skip the test where a kernel cannot run, which is found when it runs: it needs a GPU."""
    if reason := MODULES[kernel].unusable_reason(default_device()):
        pytest.skip(reason)


@pytest.fixture(params=MODULES)
def kernel(request: pytest.FixtureRequest) -> str:
    skip_without(request.param)
    return request.param


@pytest.mark.parametrize("call", [attend, packed])
def test_calls_do_not_grow_memory(kernel, call, record):
    step = gradients(partial(call, implementation=kernel))
    assert_calls_do_not_grow_memory(
        step, arrays(0), CALLS[kernel], record, kernel=kernel, call=call.__name__
    )


def test_a_scan_of_layers_under_remat_agrees_with_xla(kernel):
    q, k, v, _ = arrays(1, k=2 if kernel == "fa4" else 8)

    def loss(q, implementation):
        @jax.checkpoint
        def layer(x, _):
            mixed = attend(x, k, v, implementation)
            return (x + packed(mixed, k, v, implementation)).astype(x.dtype), None

        return jax.lax.scan(layer, q, length=3)[0].astype(jnp.float32).sum()

    found = [jax.jit(jax.grad(loss), static_argnums=1)(q, x) for x in (kernel, "xla")]
    assert_close(*found, tolerance=0.05)


def test_each_thread_gets_its_results(kernel):
    step, wrong = gradients(partial(packed, implementation=kernel)), []
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


def test_an_exported_module_runs_in_a_process_that_registers(kernel, tmp_path):
    call = partial(packed, implementation=kernel)
    check_exported(call, TARGETS[kernel], f"register_{kernel}_calls", tmp_path)


@pytest.mark.parametrize(
    "kernel, size", [(x, y) for x, sizes in SIZES.items() for y in sizes], ids=str
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_unusual_sizes_agree_with_xla(kernel, size, with_lengths):
    skip_without(kernel)
    operands = arrays(2, **size)
    options: dict[str, Any] = {}
    if with_lengths:
        lengths = jnp.arange(size["b"], dtype=jnp.int32) % (size["t"] + 1)
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    ours = ("flash", "xla") if kernel == "flash" else kernel
    found = [
        gradients(partial(attend, implementation=x, **options))(*operands) for x in (ours, "xla")
    ]
    assert_close(*found)


def test_two_implementations_run_forward_and_backward():
    """fa4 comes first, and has no deterministic backward pass."""
    skip_without("fa4")
    operands = arrays(3, b=1, t=2048, n=8, k=2, h=128)
    options = {"is_causal": True, "deterministic_backward": True}
    names = ("fa4", "cudnn")
    explanation = attn_dispatch.explain(*operands[:3], implementation=names, **options)
    assert (explanation.chosen_forward, explanation.chosen_backward) == names
    found = [
        gradients(partial(attend, implementation=x, **options))(*operands) for x in (names, "xla")
    ]
    assert_close(*found)


def test_slices_of_stacked_operands_agree_with_xla():
    """As in a scan over layers, calls read slices of one array and write slices of one."""
    skip_without("fa4")
    operands = [jnp.stack([x, -x, 2 * x]) for x in arrays(6)]

    def each(implementation):
        step = gradients(lambda *x: packed(*x, implementation))
        return jax.jit(lambda *x: jax.lax.scan(lambda _, y: (None, step(*y)), None, x)[1])

    assert_close(each("fa4")(*operands), each("xla")(*operands))


def test_a_mesh_of_all_devices_agrees_with_one_device():
    skip_without("fa4")
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(len(devices), 1), ("data", "model"))
    operands = arrays(7, b=2 * len(devices))
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
    found = gradients(partial(packed, implementation="fa4"))(
        *(jax.device_put(x, sharding) for x in operands)
    )
    assert_close(found, gradients(partial(packed, implementation="flash"))(*operands))


@pytest.mark.parametrize("with_lengths", [False, True])
def test_arrays_of_more_than_2_31_elements_equal_their_batch_rows(with_lengths, record):
    """Each batch row, and the gradients of its keys and values, equal those of the row alone."""
    skip_without("flash")
    batch, length = 33, 131072
    keys = jax.random.split(jax.random.key(5), 4)
    row = 1 + jnp.arange(batch, dtype=jnp.bfloat16)[:, None, None, None] / batch
    q, out_grad = (jax.random.normal(x, (batch, 16, 16, 64), jnp.bfloat16) for x in keys[:2])
    k, v = (jax.random.normal(x, (1, length, 8, 64), jnp.bfloat16) * row for x in keys[2:])
    assert k.size > 2**31
    lengths = length - 999 * jnp.arange(batch, dtype=jnp.int32)

    def step(q, k, v, out_grad, lengths):
        options = {"key_value_seq_lengths": lengths} if with_lengths else {}
        options |= {"causal_alignment": "bottom_right"}
        out, pull = jax.vjp(lambda *x: attend(*x, "flash", **options), q, k, v)
        return out, *pull(out_grad)

    found = jax.jit(step)(q, k, v, out_grad, lengths)
    alone, worst = jax.jit(step), 0.0
    for b in (0, batch // 2, batch - 1):
        row_arrays = (x[b : b + 1] for x in (q, k, v, out_grad, lengths))
        for x, y in zip(found, alone(*row_arrays), strict=True):
            x, y = np.asarray(x[b : b + 1], np.float32), np.asarray(y, np.float32)
            assert np.abs(y).max() > 1e-4
            worst = max(worst, float(np.abs(x - y).max() / np.abs(y).max()))
    record(with_lengths=with_lengths, worst=worst)
    assert worst < 0.01
