"""The lists of `explain_program` equal programs lowered for an H100 and optimized by XLA.

No H100 is here: the passes are those that XLA runs for a CPU, which remove what is not used, join
what is equal, and count the rounds of loops. tests/gpu/test_whole_programs.py has those of a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import pytest
from jax.export import DisabledSafetyCheck, export
from jax.sharding import AxisType
from jaxlib.cpu import _lapack

from attn_dispatch import cudnn, explain_program, target
from tests.support.backend import needs_cudnn
from tests.support.model_programs import PROGRAMS, in_a_scan_under_remat
from tests.support.optimized_hlo import compiled, listed
from tests.support.present import present
from tests.support.program_lists import of_arrays

pytestmark = needs_cudnn

TARGETS = (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)


@lru_cache(maxsize=1)
def let_cpu_compile() -> None:
    """XLA compiles custom calls that are known: any handler does, as the program never runs."""
    handler = next(x for name, x in _lapack.registrations().items() if name.endswith("_ffi"))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


def optimized(step: Any, args: Any) -> str:
    """A program lowered for an H100, after XLA's passes for a CPU."""
    let_cpu_compile()
    function, arrays = of_arrays(step, args)
    unchecked = [DisabledSafetyCheck.platform(), *map(DisabledSafetyCheck.custom_call, TARGETS)]
    with target("h100"):
        made = export(jax.jit(function), platforms=["cuda"], disabled_checks=unchecked)(arrays)
    return present(jax.jit(made.call).lower(arrays).compile().as_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_list_equals_the_optimized_hlo(name: str):
    maker = PROGRAMS[name]
    for package in maker.packages:
        pytest.importorskip(package)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    program = maker.make(*[mesh] * maker.is_on_mesh)
    found = explain_program(program.step, *program.args, target="h100")
    expected = compiled(optimized(program.step, program.args))
    assert listed(found) == expected and found.others == ()
    runs: Counter[str] = Counter()
    for kernel, times in expected.items():
        runs[kernel.target] += times
    assert [runs[x] for x in TARGETS] == [program.forward, program.backward]


def test_other_kernels_are_noticed():
    """A list of another program, and one with other numbers, are not equal to the HLO."""
    program = in_a_scan_under_remat()
    found = explain_program(program.step, *program.args, target="h100")
    expected = compiled(optimized(program.step, program.args))
    (call,) = found.calls
    more = replace(found, calls=(replace(call, forward_runs=call.backward_runs),))
    assert listed(more) != expected
    q, *rest = call.explanation.call.operands
    longer = replace(q, shape=(q.shape[0], 2 * q.shape[1], *q.shape[2:]))
    spec = replace(call.explanation.call, operands=(longer, *rest))
    other = replace(call, explanation=replace(call.explanation, call=spec))
    assert listed(replace(found, calls=(other,))) != expected
