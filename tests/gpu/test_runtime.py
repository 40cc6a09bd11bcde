"""The custom calls in long-running programs: memory, threads, streams, graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.gpu_programs import (
    arrays,
    assert_calls_do_not_grow_memory,
    in_new_process,
    step,
    step_packed,
)


@pytest.mark.parametrize("step", [step, step_packed], ids=["plain", "packed"])
def test_1000_calls_do_not_grow_memory(step, record):
    assert_calls_do_not_grow_memory(step, arrays(0), 1000, record)


def test_two_threads_get_the_results_of_one(record):
    """Each thread runs another program, with separate cuDNN handles."""
    inputs = [arrays(seed, t=256 * (seed + 1)) for seed in range(2)]
    alone = [[np.asarray(x) for x in step(*operands)] for operands in inputs]
    failures: list[str] = []

    def work(index: int) -> None:
        for repeat in range(100):
            got = step(*inputs[index])
            for name, x, expected in zip("out dq dk dv".split(), got, alone[index], strict=True):
                # dq is summed with atomics and equal up to rounding; out is equal exactly.
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


def test_two_streams_give_the_results_of_one(record):
    """XLA's stream annotation puts two calls of one program on two CUDA streams."""
    printed = in_new_process(
        """
        import jax, numpy as np
        from jax.experimental.compute_on import compute_on
        from tests.support.gpu_programs import arrays, attend
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
def test_a_command_buffer_gives_the_same_results(step, record, tmp_path):
    """XLA captures the custom calls in a CUDA graph and replays it."""
    results, thunks = {}, {}
    for name, commands in (("plain", ""), ("captured", "+CUSTOM_CALL")):
        dump, path = tmp_path / name, str(tmp_path / f"{name}.npz")
        in_new_process(
            f"""
            import jax, numpy as np
            from tests.support.gpu_programs import arrays, {step} as step
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
        # After XLA's passes a captured custom call is inside a command buffer thunk.
        thunks[name] = any("kCommandBuffer" in text for text in sequences)
    record(step=step, has_command_buffer=thunks)
    assert thunks == {"plain": False, "captured": True}
    for index, (plain, graph) in enumerate(
        zip(results["plain"].values(), results["captured"].values(), strict=True)
    ):
        # out is computed in a fixed order; gradients add up with atomics.
        tolerance = 0 if index == 0 else 2e-2 * np.abs(plain).max()
        assert np.max(np.abs(plain - graph)) <= tolerance
