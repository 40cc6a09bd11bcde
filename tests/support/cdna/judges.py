"""Calls whose passes all run on ASM kernels, each as a judge of the handlers that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from tests.support.aiter_check import Check
from tests.support.cdna import generations
from tests.support.cdna.cases import CASES, CASES_V0_1_15, CAUSAL, TIMED, case
from tests.support.cdna.kernel_calls import OURS, Choice
from tests.support.cdna.kernel_runs import KernelRun, started
from tests.support.cdna.kernels import MI300

_PACKED: dict[str, Any] = {
    "t": 280, "s": 300, "cu_q": ((0, 130, 280),), "cu_kv": ((0, 140, 300),), "longest": (150, 160)
}  # fmt: skip
_BATCH: dict[str, Any] = {"b": 2, "n": 4, "k": 2, "t": 150, "s": 70}
_NEWER = (
    *CASES_V0_1_15,
    case("batch", **_BATCH),
    case("packed", **_PACKED, **CAUSAL),
    case("64", h=64, **_BATCH),
    case("192 and 128", h=192, v=128, dtype="float16"),
)
_EVEN = case("even", **(_BATCH | {"t": 192, "s": 192}))
_SIXTEEN_BIT = Choice(accumulator="atomic_16")


@dataclass(frozen=True)
class Judge:
    name: str
    notices: Callable[[], bool]
    """Whether the call fails: by a wrong result, by an error, or by other kernels than its own."""


def _runs() -> Iterator[KernelRun]:
    for call in CASES:
        if "ck" not in call.kernels:
            yield KernelRun("dev18", call.arch, call.case, OURS, MI300, ())
    yield KernelRun("dev18", "gfx950", _EVEN, _SIXTEEN_BIT, MI300, ())
    for arch in generations.ARCHS if not generations.missing("v0.1.15") else ():
        for call in _NEWER:
            if (arch, call.h) != ("gfx950", 192):  # a barrier is missing there
                yield KernelRun("v0.1.15", arch, call, OURS, MI300, ())
        yield KernelRun("v0.1.15", arch, _EVEN, _SIXTEEN_BIT, MI300, ())


def machine_code_judges() -> Iterator[Judge]:
    """The calls of tests/cdna without a pass on CK, in times like hardware's."""
    yield from map(_judge, _runs())


def _judge(run: KernelRun) -> Judge:
    with started(run) as (gpu, check):
        gpu.schedule = TIMED
        assert not _fails(run, check), run
        kernels, most = list(gpu.ran), 10 * gpu.instructions
    assert kernels and "ck" not in kernels, (run, kernels)

    def notices() -> bool:
        with generations.gpu_of(run.generation, run.arch) as gpu:
            gpu.schedule = replace(TIMED, most_instructions=most)
            return _fails(run, check) or gpu.ran != kernels

    return Judge(str(run), notices)


def _fails(run: KernelRun, check: Check) -> bool:
    try:
        errors = check.errors()
    except (jax.errors.JaxRuntimeError, RuntimeWarning):
        return True
    return not all(x <= run.allowed for x in errors.values())
