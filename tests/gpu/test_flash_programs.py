"""FlashAttention in programs: a scan, remat, threads, exported modules, and unusual sizes."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import flash
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import default_device
from tests.support.flash_programs import assert_close, attend, check_exported, gradients, packed
from tests.support.gpu_programs import arrays, device_bytes_in_use, pool_bytes


def unusable() -> str:
    """The reason against running here. It is found when a test runs, which needs a GPU."""
    return flash.unusable_reason(default_device())


@pytest.fixture(autouse=True)
def usable():
    if reason := unusable():
        pytest.skip(reason)


@pytest.mark.parametrize("call", [attend, packed])
def test_500_calls_do_not_grow_memory(call, record):
    step, operands = gradients(call), arrays(0)
    for _ in range(20):
        jax.block_until_ready(step(*operands))
    before = device_bytes_in_use() - pool_bytes()
    results = None
    for _ in range(500):
        results = step(*operands)
    jax.block_until_ready(results)
    after = device_bytes_in_use() - pool_bytes()
    record(call=call.__name__, outside_pool_before=before, outside_pool_after=after)
    assert after <= before


def test_a_scan_of_layers_under_remat_agrees_with_xla():
    q, k, v, _ = arrays(1, k=8)

    def loss(q, implementation):
        @jax.checkpoint
        def layer(x, _):
            mixed = attend(x, k, v, implementation)
            return (x + packed(mixed, k, v, implementation)).astype(x.dtype), None

        return jax.lax.scan(layer, q, length=3)[0].astype(jnp.float32).sum()

    found = [jax.jit(jax.grad(loss), static_argnums=1)(q, x) for x in ("flash", "xla")]
    assert_close(*found, tolerance=0.05)


def test_each_thread_gets_its_results():
    step, wrong = gradients(packed), []
    expected = {seed: [np.asarray(x) for x in step(*arrays(seed))] for seed in range(4)}

    def run(seed: int) -> None:
        for _ in range(20):
            out = np.asarray(step(*arrays(seed))[0])
            if not np.array_equal(out, expected[seed][0]):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "size",
    [
        {"b": 70_000, "t": 8, "n": 1, "k": 1},
        {"b": 1, "t": 3, "n": 3, "k": 3},
        {"b": 2, "t": 1, "n": 8, "k": 1, "h": 256},
        {"b": 3, "t": 1000, "n": 6, "k": 3, "h": 72},
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
    # With more batch rows than a grid has blocks the backward pass is refused.
    found = [
        gradients(lambda *x, name=name: attend(*x, name, **options))(*operands)
        for name in (("flash", "xla"), "xla")
    ]
    assert_close(*found)


def test_an_exported_module_runs_in_a_process_that_registers(tmp_path):
    targets = [*flash.library.TARGETS, *clear_rows.TARGETS]
    check_exported(packed, targets, "register_flash_calls", tmp_path)


@pytest.mark.parametrize("with_lengths", [False, True])
def test_arrays_of_more_than_2_31_elements_equal_their_batch_rows(with_lengths, record):
    """Each batch row, and the gradients of its keys and values, equal those of the row alone."""
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
        out, pull = jax.vjp(lambda *x: attend(*x, **options), q, k, v)
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
