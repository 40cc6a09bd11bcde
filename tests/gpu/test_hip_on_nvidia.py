"""AITER's handlers on an NVIDIA GPU, where calls only queue work in memory the host cannot read.

hip_on_nvidia.py describes and builds the module, whose path is in ATTN_DISPATCH_HIP_ON_NVIDIA. The
emulator in it adds in a fixed order, so that results must be equal to the last bit.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import aiter
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.judge import error
from tests.scripts import hip_on_nvidia
from tests.support.aiter_cases import AITER_CASES, CASES_BY_GFX, SIXTEEN_BIT_CASES
from tests.support.aiter_check import Check, sixteen_bit_atomics
from tests.support.gpu_programs import in_new_process
from tests.support.present import present

MODULE = os.environ.get(hip_on_nvidia.VARIABLE, "")
pytestmark = pytest.mark.skipif(
    not MODULE,
    reason=f"{hip_on_nvidia.VARIABLE} names no module of scripts/hip_on_nvidia.py",
)

DEVICE = parse("gfx942")
BY_NAME = {case.name: case for case in AITER_CASES}
CK, ASM = BY_NAME["causal"], BY_NAME["asm_causal"]
RESULTS = ("out", "lse", "query", "key", "value")

STEPS = 25  # each has a forward and a backward call; XLA's queue holds 32 programs
RUNS = 20


@pytest.fixture(autouse=True)
def emulator():
    found = hip_on_nvidia.emulator(MODULE)
    yield found
    found.reset()


@pytest.mark.parametrize(("case", "gfx"), (*CASES_BY_GFX, *SIXTEEN_BIT_CASES), ids=str)
def test_results_agree_with_the_reference(case, gfx, emulator, record):
    emulator.set_arch(gfx)
    is_16_bit = (case, gfx) in SIXTEEN_BIT_CASES
    with sixteen_bit_atomics() if is_16_bit else nullcontext():
        check = Check.of(case, parse(gfx), emulator)
    errors = check.errors()
    record(case=case.name, gfx=gfx, error_over_allowance=errors)
    assert all(x <= 1 for x in errors.values()), errors
    assert check.differences_from_expected_calls() == []


def test_queued_calls_give_the_results_of_waiting_ones(record):
    """Fifty calls in donated buffers are queued after a long computation, each using the last."""
    operands = on_device(ASM)
    query = operands.pop("query")
    ones = jnp.ones(2**30, jnp.float32)
    expected = [int(x) for x in chain(jnp.array(query, copy=True), operands, wait=True)]
    jax.block_until_ready(after_long_work(query, ones, ones[0]))
    begin = time.perf_counter()
    queued = chain(after_long_work(query, ones, ones[0]), operands, wait=False)
    seconds_to_queue = time.perf_counter() - begin
    got = [int(x) for x in queued]
    seconds = time.perf_counter() - begin
    record(calls=2 * STEPS, seconds_to_queue=seconds_to_queue, seconds=seconds)
    assert got == expected


@jax.jit
def after_long_work(x, ones, one):
    """`x`, after 200 passes over the ones."""
    passed = jax.lax.fori_loop(0, 200, lambda _, y: y * one, ones)
    return x * passed[0].astype(x.dtype)


def chain(query: jax.Array, operands, *, wait: bool) -> list[jax.Array]:
    """The sum of the bits of each step's results. With `wait` each step ends before the next."""
    sums = []
    for _ in range(STEPS):
        query, bits = step(query, operands)
        if wait:
            query.block_until_ready()
        sums.append(bits)
    return sums


@partial(jax.jit, donate_argnums=0)
def step(query, operands):
    operands = operands | {"query": query, "out_grad": query}
    operands["out"], operands["lse"] = forward_of(ASM, operands)
    dq, dk, dv = backward_of(ASM, operands)
    following = jnp.tanh(operands["out"] + dq)
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (following, dk, dv)]
    return following, sum(x.astype(jnp.uint32).sum(dtype=jnp.uint32) for x in bits)


def test_two_threads_get_the_results_of_one(emulator, record):
    """Each thread runs another program."""
    checks = [Check.of(BY_NAME[name], DEVICE, emulator) for name in ("asm_causal", "packed")]
    alone = [check.run() for check in checks]

    def work(index: int) -> list[str]:
        wrong = []
        for repeat in range(50):
            got = checks[index].run()
            wrong += [
                f"thread {index}, call {repeat}, {name}"
                for name, x in got.items()
                if not np.array_equal(x, alone[index][name])
            ]
        return wrong

    with ThreadPoolExecutor(2) as pool:
        failures = [x for wrong in pool.map(work, range(2)) for x in wrong]
    record(threads=2, calls_each=50, failures=failures)
    assert not failures


def test_a_failed_call_is_an_error_and_the_next_one_runs(emulator):
    """The handler's message reaches the caller."""
    check = Check.of(CK, DEVICE, emulator)
    assert max(check.errors().values()) <= 1
    emulator.fail_next("as the test wants it")
    with pytest.raises(jax.errors.JaxRuntimeError, match="as the test wants it"):
        check.run()
    assert max(check.errors().values()) <= 1


def test_two_streams_give_the_results_of_one(record):
    """XLA's stream annotation puts two calls of one program on two CUDA streams."""
    printed = in_child("print_two_streams()", "--xla_gpu_experimental_stream_annotation=true")
    record(rounds=RUNS, annotated_asynchronous_wrong=printed.split())
    assert printed.split() == ["True", "True", "0"]


def print_two_streams() -> None:
    from jax.experimental.compute_on import compute_on

    hip_on_nvidia.emulator(MODULE)

    def attend(operands):
        return forward_of(ASM, operands, needs_lse=False)[0]

    on_other_stream = compute_on(
        attend, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device
    )
    both = jax.jit(lambda a, b: (on_other_stream(a), attend(b)))
    a = {name: x for name, x in on_device(ASM).items() if name != "out_grad"}
    b = a | {"query": -a["query"]}
    alone = [np.asarray(jax.jit(attend)(x)) for x in (a, b)]
    wrong = 0
    for _ in range(RUNS):
        for got, expected in zip(both(a, b), alone, strict=True):
            wrong += not np.array_equal(np.asarray(got), expected)
    hlo = present(both.lower(a, b).compile().as_text())
    print(hlo.count('_xla_stream_annotation="1"') > 0, "-start" in hlo, wrong)


def test_a_command_buffer_replays_the_forward_call(emulator, record, tmp_path):
    """XLA captures the forward call in a CUDA graph, but not the backward call."""
    check = Check.of(CK, DEVICE, emulator)
    captured: dict[str, dict[str, bool]] = {}
    handler_calls: dict[str, list[int]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, commands in (("plain", ""), ("captured", "CUSTOM_CALL")):
        dump, path = tmp_path / name, tmp_path / f"{name}.npz"
        in_child(
            f"save_runs({str(path)!r})",
            f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1 "
            f"--xla_dump_to={dump}",
        )
        captured[name] = {
            direction: any("kCommandBuffer" in text for text in thunk_sequences(dump, direction))
            for direction in ("forward", "backward")
        }
        saved: dict[str, Any] = dict(np.load(path))
        handler_calls[name] = saved["handler_calls"].tolist()
        errors[name] = {
            x: max(
                # Every second run has its two batch rows exchanged.
                error(np.roll(saved[x][run], run % 2, axis=0), check.expected[x])
                for run in range(RUNS)
            )
            / check.allowance[x]
            for x in RESULTS
        }
    record(runs=RUNS, captured=captured, handler_calls=handler_calls, error_over_allowance=errors)
    assert captured == {
        "plain": {"forward": False, "backward": False},
        "captured": {"forward": True, "backward": False},
    }
    assert handler_calls["plain"] == [RUNS, RUNS]
    # A replay does not call the handler.
    assert handler_calls["captured"][0] < RUNS and handler_calls["captured"][1] == RUNS
    assert all(x <= 1 for row in errors.values() for x in row.values())


def thunk_sequences(dump: Path, function: str) -> list[str]:
    found = [path.read_text() for path in dump.glob(f"*jit_{function}*thunk_sequence*")]
    assert found
    return found


def save_runs(path: str) -> None:
    """Run both directions as separate programs, with two inputs in turn, and save the results."""
    emulator = hip_on_nvidia.emulator(MODULE)

    @jax.jit
    def forward(operands):
        return forward_of(CK, operands)

    @jax.jit
    def backward(operands):
        return backward_of(CK, operands)

    inputs = on_device(CK), on_device(CK, roll=1)
    saved = {name: [] for name in RESULTS}
    for run in range(RUNS):
        operands = inputs[run % 2]
        out, lse = forward(operands)
        results = (out, lse, *backward(operands | {"out": out, "lse": lse}))
        for name, x in zip(RESULTS, results, strict=True):
            saved[name].append(np.asarray(x, np.float64))
    calls = [emulator.calls(direction) for direction in ("forward", "backward")]
    np.savez(path, handler_calls=calls, **saved)


def in_child(call: str, xla_flags: str) -> str:
    """The output of a function of this file in a process with these XLA flags."""
    imported = "from tests.gpu import test_hip_on_nvidia"
    code = f"sys.path += {sys.path!r}\n{imported}\ntest_hip_on_nvidia.{call}"
    return in_new_process(code, xla_flags)


def on_device(case: Case, roll: int = 0) -> dict[str, jax.Array]:
    operands = case.operands() | case.cotangents()
    return {name: jnp.asarray(np.roll(x, roll, axis=0)) for name, x in operands.items()}


def forward_of(case: Case, operands, *, needs_lse: bool = True) -> tuple[jax.Array, ...]:
    spec = spec_of(case.forward_options(needs_lse=needs_lse), operands)
    return aiter.forward(spec, DEVICE, {name: operands[name] for name in spec.options.operands})


def backward_of(case: Case, operands) -> tuple[jax.Array, ...]:
    spec = spec_of(case.backward_options(), operands)
    return aiter.backward(spec, DEVICE, {name: operands[name] for name in spec.options.operands})
