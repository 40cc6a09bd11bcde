"""What a long-running program needs of the custom calls: memory, threads, streams, graphs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from tests.support.repository import ROOT


def arrays(seed: int, b=2, t=512, n=8, k=2, h=64):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, n, h))
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def attend(q, k, v):
    return attn_dispatch.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@jax.jit
def step(q, k, v, out_grad):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(out_grad)


def attend_packed(q, k, v):
    """Four sequences in each row, the third without tokens, and a tail that is of none."""
    ids = jnp.repeat(
        jnp.array([1, 2, 4, 0]), jnp.array([200, 130, 150, 32]), total_repeat_length=512
    )
    ids = jnp.broadcast_to(ids, q.shape[:2])
    return attn_dispatch.dot_product_attention(
        q, k, v, query_segment_ids=ids, max_segments=4, is_causal=True, implementation="cudnn"
    )


@jax.jit
def step_packed(q, k, v, out_grad):
    out, pull = jax.vjp(attend_packed, q, k, v)
    return out, *pull(out_grad)


def device_bytes_in_use() -> int:
    """All memory in use on the device, XLA's pool and everyone else's."""
    driver = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def pool_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats.get("pool_bytes") or stats["bytes_reserved"]


@pytest.mark.parametrize("step", [step, step_packed], ids=["plain", "packed"])
def test_thousand_calls_do_not_grow_memory(step, record):
    operands = arrays(0)
    for _ in range(20):
        jax.block_until_ready(step(*operands))
    before, pool_before = device_bytes_in_use(), pool_bytes()
    for _ in range(1000):
        results = step(*operands)
    jax.block_until_ready(results)
    outside_before = before - pool_before
    outside_after = device_bytes_in_use() - pool_bytes()
    record(calls=1000, outside_pool_before=outside_before, outside_pool_after=outside_after)
    assert outside_after <= outside_before


def test_two_threads(record):
    """Each thread drives its own program, with cuDNN handles of its own."""
    inputs = [arrays(seed, t=256 * (seed + 1)) for seed in range(2)]
    alone = [[np.asarray(x) for x in step(*operands)] for operands in inputs]
    failures: list[str] = []

    def work(index: int) -> None:
        for repeat in range(100):
            got = step(*inputs[index])
            for name, x, expected in zip("out dq dk dv".split(), got, alone[index], strict=True):
                # dq is accumulated with atomics: equal up to rounding, out exactly.
                x, expected = np.asarray(x, np.float32), expected.astype(np.float32)
                tolerance = 0 if name == "out" else 2e-2 * np.abs(expected).max()
                if not np.max(np.abs(x - expected)) <= tolerance:
                    failures.append(f"thread {index}, call {repeat}, {name}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record(threads=2, calls_each=100, failures=failures)
    assert not failures


def in_new_process(code: str, xla_flags: str) -> str:
    """What the code prints in a process with these XLA flags; it can import `tests`."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT],
        env={**os.environ, "XLA_FLAGS": xla_flags}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_streams(record):
    """Two calls of one program on two CUDA streams, as XLA's stream annotation asks for."""
    printed = in_new_process(
        """
        import jax, numpy as np
        from jax.experimental.compute_on import compute_on
        from tests.gpu.test_runtime import arrays, attend
        elsewhere = compute_on(
            attend, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device
        )
        both = jax.jit(lambda a, b: (elsewhere(*a[:3]), attend(*b[:3])))
        a, b = arrays(3, b=8, t=2048), arrays(4, b=8, t=2048)
        alone = [np.asarray(jax.jit(attend)(*x[:3])) for x in (a, b)]
        wrong = 0
        for _ in range(50):
            for got, expected in zip(both(a, b), alone, strict=True):
                wrong += not np.array_equal(np.asarray(got), expected)
        hlo = both.lower(a, b).compile().as_text()
        print(hlo.count('_xla_stream_annotation="1"') > 0, "-start" in hlo, wrong)
        """,
        "--xla_gpu_experimental_stream_annotation=true",
    )
    record(rounds=50, annotated_asynchronous_wrong=printed.split())
    assert printed.split() == ["True", "True", "0"]


@pytest.mark.parametrize("step", ["step", "step_packed"])
def test_command_buffer(step, record, tmp_path):
    """The same numbers when XLA captures the custom calls in a CUDA graph and replays it."""
    results, thunks = {}, {}
    for name, commands in (("plain", ""), ("captured", "+CUSTOM_CALL")):
        dump, path = tmp_path / name, str(tmp_path / f"{name}.npz")
        in_new_process(
            f"""
            import jax, numpy as np
            from tests.gpu.test_runtime import arrays, {step} as step
            operands = arrays(0)
            for _ in range(5):
                results = jax.block_until_ready(step(*operands))
            np.savez({path!r}, *[np.asarray(x, np.float32) for x in results])
            """,
            f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1 "
            f"--xla_dump_to={dump}",
        )
        results[name] = dict(np.load(path))
        sequences = [f.read_text() for f in dump.glob(f"*jit_{step}*thunk_sequence*")]
        assert sequences
        # After XLA's passes, a captured custom call stands inside a command buffer thunk.
        thunks[name] = any("kCommandBuffer" in text for text in sequences)
    record(step=step, has_command_buffer=thunks)
    assert thunks == {"plain": False, "captured": True}
    for index, (plain, graph) in enumerate(
        zip(results["plain"].values(), results["captured"].values(), strict=True)
    ):
        # out is computed in a fixed order; gradients add up with atomics.
        tolerance = 0 if index == 0 else 2e-2 * np.abs(plain).max()
        assert np.max(np.abs(plain - graph)) <= tolerance
