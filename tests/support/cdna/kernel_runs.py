"""Calls that select each kernel, run under many orders of events."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import jax
import numpy as np

from attn_dispatch import setting_blocks
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna import defects, generations
from tests.support.cdna.cases import KernelCase, drawn_schedule
from tests.support.cdna.kernel_calls import OURS, Choice, calls_of, lifted_rules
from tests.support.cdna.kernels import MI300, MI308, Gpu
from tests.support.cdna.machine import Schedule
from tests.support.cdna.repairs import RepairedMachine

_NEARLY = 4
"""The share of what is allowed up to which an error may be that of rounding; `verify` decides."""


@dataclass(frozen=True)
class KernelRun:
    """A call, and the kernels whose smallest call it is."""

    generation: str
    arch: str
    case: Case
    choice: Choice
    board: str
    kernels: tuple[str, ...]
    lifted: tuple[str, ...] = ()

    def __str__(self) -> str:
        choice = "" if self.choice == OURS else f" {self.choice.rounding} {self.choice.accumulator}"
        board = "" if self.board == MI300 else f" {self.board}"
        return f"{self.generation} {self.arch}{board} {self.case}{choice}"

    @property
    def allowed(self) -> float:
        """The allowed share of the conformance suite's errors: twice as much where a kernel rounds
        towards zero or sums in 16 bits, as the front end never asks it to."""
        usual = KernelCase(self.arch, self.case, ()).allowed
        return usual if self.choice == OURS else 2


def runs(generation: str, arch: str, *, lifted: bool = False) -> list[KernelRun]:
    """A run for each call that is some kernel's smallest, with our choice first.

    With `lifted` they are those of the kernels that only rules of ours keep from calls.
    """
    rules = lifted_rules(generation, arch) if lifted else ()
    found: dict[tuple[str, str, Case, Choice], list[str]] = {}
    usual = calls_of(generation, arch)
    for kernel, (case, choice) in calls_of(generation, arch, rules).items():
        if lifted and kernel in usual:
            continue
        board = MI308 if kernel.startswith(MI308) else MI300
        # Tuples before lists: our choice is the first of each call's.
        found.setdefault((board, str(case), case, choice), []).append(kernel)
    made = [
        KernelRun(generation, arch, case, choice, board, tuple(kernels), rules)
        for (board, _, case, choice), kernels in found.items()
    ]
    return sorted(made, key=lambda x: x.choice != OURS)


@dataclass
class Outcome:
    """What came out of a run's schedules."""

    right: int = 0
    wrong: int = 0
    timed_wrong: int = 0
    """The wrong runs whose times are like hardware's."""
    conflicts: int = 0
    """The schedules in which LDS is read and overwritten with no barrier between."""
    fewest_cycles: int | None = None
    """Between two such accesses, in times like hardware's."""
    worst: float = 0.0
    """The largest error as a share of what is allowed, of the right ones."""
    problems: list[str] = field(default_factory=list)
    """What is not explained by a known defect, or is wrong with it repaired too."""


@contextmanager
def started(run: KernelRun) -> Iterator[tuple[Gpu, Check]]:
    """The run's GPU, and its call compiled for it."""
    with (
        generations.gpu_of(run.generation, run.arch, run.lifted) as gpu,
        run.choice.made(),
        setting_blocks.rewrites(False),
    ):
        gpu.board = run.board
        yield gpu, Check.of(run.case, parse(run.arch), gpu.emulator)


def try_schedule(run: KernelRun, gpu: Gpu, check: Check, outcome: Outcome) -> None:
    """Run the call under the GPU's schedule, and add to the outcome."""
    gpu.ran, gpu.conflicts = [], []
    error, failure = _tried(run, check)
    is_timed, is_right = gpu.schedule.landing == "timed", bool(error <= 1)
    unsafe = any(defects.known("barrier", run.arch, x) for x in gpu.ran)
    unknown = defects.unknown_conflicts(run.arch, gpu.conflicts)
    missing = {x.removeprefix(f"{MI308}/") for x in run.kernels} - set(gpu.ran)
    outcome.right += is_right
    outcome.wrong += not is_right
    outcome.timed_wrong += is_timed and not is_right
    outcome.conflicts += bool(gpu.conflicts)
    outcome.worst = max(outcome.worst, error if is_right else 0)
    apart = [int(x) for x in re.findall(r"(\d+) cycles apart", " ".join(gpu.conflicts))]
    if apart:
        outcome.fewest_cycles = min(*apart, outcome.fewest_cycles or apart[0])
    explained = is_right or (unsafe and not is_timed and _is_right_repaired(run, gpu, check))
    if unknown or missing or not explained:
        text = f"error {error:.3g} {failure} conflicts {unknown[:1]} not run {sorted(missing)}"
        outcome.problems.append(f"{gpu.schedule}: {text}")


def _is_right_repaired(run: KernelRun, gpu: Gpu, check: Check) -> bool:
    """Whether nothing is wrong with the barriers put in that the kernels lack."""
    found, gpu.machine = gpu.machine, _repaired_machine()
    before, gpu.conflicts = gpu.conflicts, []
    try:
        return _tried(run, check)[0] <= 1 and not gpu.conflicts
    finally:
        gpu.machine, gpu.conflicts = found, before


@cache
def _repaired_machine() -> RepairedMachine:
    return RepairedMachine()


def _tried(run: KernelRun, check: Check) -> tuple[float, str]:
    """The error of a run of the call, and why it failed, if it did."""
    try:
        return _error(run, check), ""
    except (jax.errors.JaxRuntimeError, RuntimeWarning) as raised:
        return math.inf, str(raised)[-200:]


def _error(run: KernelRun, check: Check) -> float:
    """The largest error as a share of what is allowed."""
    got = check.run()
    error = float(max(check.errors_of(got).values())) / run.allowed
    if 1 < error < _NEARLY:
        return min(error, float(max(check.errors_by_verify(got).values())) / run.allowed)
    return error


def schedules(run: KernelRun, number: int, seed: int = 0) -> Iterator[Schedule]:
    random = np.random.default_rng([seed, *str(run).encode()])
    return (drawn_schedule(random) for _ in range(number))


def outcome_of(run: KernelRun, number: int, seed: int = 0) -> Outcome:
    """The outcome of so many drawn schedules."""
    outcome = Outcome()
    with started(run) as (gpu, check):
        for gpu.schedule in schedules(run, number, seed):
            try_schedule(run, gpu, check, outcome)
    return outcome
