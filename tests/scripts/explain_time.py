"""The time that `explain_program` takes for training steps, beside that of tracing them alone.

usage: python -m tests.scripts.explain_time [--rounds N]

JAX's caches are cleared before each measurement, and plans of cuDNN are kept from the first round,
which is not counted. Along Auto axes the program is lowered too, to find how it is split.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import AbstractMesh, AxisType

from attn_dispatch import explain_program
from tests.support.model_programs import PROGRAMS, ModelProgram
from tests.support.program_lists import of_arrays

MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def seconds(run: Callable[[], object]) -> float:
    jax.clear_caches()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def times(program: ModelProgram, rounds: int) -> tuple[float, float]:
    """The least seconds of tracing and of `explain_program`, measured in turn."""
    function, arrays = of_arrays(program.step, program.args)

    def trace() -> object:
        return jax.jit(lambda arrays: function(arrays)).trace(arrays)

    def explain() -> object:
        return explain_program(program.step, *program.args, target="h100")

    explain()
    pairs = [(seconds(trace), seconds(explain)) for _ in range(rounds)]
    return min(x for x, _ in pairs), min(y for _, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time explain_program beside tracing alone.")
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    print("| program | tracing | explain_program | ratio |\n|---|---|---|---|")
    for name, maker in PROGRAMS.items():
        program = maker.make(*[MESH] * maker.is_on_mesh)
        tracing, explaining = times(program, rounds)
        ratio = explaining / tracing
        print(f"| {name} | {1e3 * tracing:.0f} ms | {1e3 * explaining:.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
