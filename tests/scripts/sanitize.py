"""Build the C++ with sanitizers and run tests on it: `make sanitize`, or `make sanitize-quick`.

AddressSanitizer and UndefinedBehaviorSanitizer cover the CUDA library in the tests that plan, the
handlers for AMD and the emulator in their tests, both in the fuzz tests, and the handlers that
clear rows and those of compiled FlashAttention-4 (with a mask, of wide heads, of tangents) over
stand-ins for the driver and the kernels. ThreadSanitizer covers the caches,
CudnnScope, and eight threads that load, plan and end (tests/cuda_backend). cuDNN and Python are not
instrumented, and leaks are not reported: CPython keeps what it allocates at import.

usage: python -m tests.scripts.sanitize [--quick] [--write]

The exit status is 1 if anything was found. --write puts a summary into tests/results/sanitize.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT, TESTS

BACKEND = ROOT / "cuda_backend"
COMMON_BACKEND = ROOT / "common_backend"
FOLDER = ROOT / "build" / "sanitize"
REPORT = TESTS / "results" / "sanitize.md"
SITE = TESTS / "scripts" / "sanitized"
"""A folder on the Python path of every process that runs tests of the CUDA library."""

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
COMMON = ("-g1", "-fno-omit-frame-pointer")
THREAD = ("-fsanitize=thread",)

STEP_SECONDS = 3600.0
"""The time limit of a step, after which it has failed."""

NEEDS_XLA_OR_PYTHON = (
    "module.cc", "handlers.cc", "ffi_attributes.cc", "python_attributes.cc",
    "clear_rows_handler.cc", "clear_ends_handler.cc",
)  # fmt: skip
"""Sources that the program for ThreadSanitizer leaves out."""

WITH_FRONTEND = ("plan.cc", "loaded_plan.cc", "plan_line.cc", "graph.cc", "engine.cc")
"""Sources compiled as one, since each includes the 40,000 lines of cudnn-frontend."""


def drawn(*modules: str) -> tuple[str, ...]:
    """The tests of some modules of tests/fuzz."""
    test = "fuzz/test_draws.py::test_drawn_inputs_are_refused_or_give_what_they_should"
    return tuple(f"{test}[{name}]" for name in modules)


@dataclass(frozen=True)
class Tests:
    """The tests of one library: the quick ones, and the rest."""

    name: str
    quick: tuple[str, ...]
    rest: tuple[str, ...]
    without: str = ""
    quick_draws: int = 0  # 0: each test's default number
    draws: int = 2000


CUDA = Tests(
    "CUDA library, planning",
    ("cuda_backend/test_plan_cache.py",
     "cuda_backend/test_process_life.py::test_a_child_forked_while_threads_plan_is_refused",
     "cuda_backend/test_process_life.py::test_exit_waits_for_threads_that_plan",
     "fuzz/test_attributes.py", *drawn("cudnn_attributes", "plan_lines")),
    ("cuda_backend/test_process_life.py::test_exit_does_not_wait_longer_than_its_limit",
     "cuda_backend/test_process_life.py::test_the_thread_that_ends_the_process_can_still_plan",
     "cuda_backend/test_process_life.py::test_a_child_forked_before_any_plan_can_plan",
     "cudnn/test_plan_store.py", "cudnn/test_planning_process.py",
     "cudnn/test_planning_process_failures.py", "cudnn/test_engines.py",
     "cuda_backend/test_known_bad.py", "core/test_threads.py"),
    # That test expects the message of a SIGSEGV, which AddressSanitizer replaces by its report.
    without="test_crash_refuses_its_call_only",
)  # fmt: skip
ROCM = Tests(
    "AMD handlers and emulator",
    ("rocm_backend/test_emulator_split_kv.py", "aiter/test_errors.py",
     "aiter/test_library_errors.py", *drawn("aiter_calls", "aiter_folders")),
    ("rocm_backend/test_emulator.py", "aiter/test_public.py", "aiter/test_lowering.py"),
)  # fmt: skip
FA4 = Tests(
    "FlashAttention-4's handlers and clearing",
    (),
    ("cuda_backend/test_clear_handlers.py", "cuda_backend/test_fa4_*.py", "fa4/test_*_calls.py",
     "fa4/test_compiled.py"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    step: str
    seconds: float
    result: str
    passed: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small set, for CI")
    parser.add_argument("--write", action="store_true", help=f"summary into {REPORT.name}")
    chosen = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # The longest compilation keeps one core busy; the other core does the rest.
    with ThreadPoolExecutor(max_workers=2) as pool:
        cuda = pool.submit(outcomes_of, cuda_tests, quick=chosen.quick)
        others = [
            pool.submit(outcomes_of, emulated_tests, quick=chosen.quick),
            pool.submit(outcomes_of, thread_checks),
        ]
        outcomes = [outcome for steps in (cuda, *others) for outcome in steps.result()]
        if not chosen.quick:
            outcomes += outcomes_of(planning_threads)
    if chosen.write:
        REPORT.write_text(summary(outcomes, time.monotonic() - began, quick=chosen.quick))
    sys.exit(not all(outcome.passed for outcome in outcomes))


def outcomes_of(steps: Callable[..., Iterable[Outcome]], **how: bool) -> list[Outcome]:
    outcomes = []
    for outcome in steps(**how):
        print(f"{outcome.step}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def cuda_tests(*, quick: bool) -> Iterable[Outcome]:
    optimization = "-O0" if quick else "-Og"
    built = run("CUDA library, built with ASan + UBSan", [_cmake(optimization), _ninja()])
    yield built
    if built.passed:
        (library,) = (FOLDER / "cuda" / "cuda_backend").glob("_cuda.*.so")
        yield pytest(CUDA, quick=quick, ATTN_DISPATCH_SANITIZED_CUDA=str(library))


def emulated_tests(*, quick: bool) -> Iterable[Outcome]:
    flags = " ".join([*COMMON, *ADDRESS])
    yield pytest(ROCM, quick=quick, ATTN_DISPATCH_TEST_SANITIZE=flags)
    if not quick:  # CI has no minutes for another build
        yield pytest(FA4, quick=quick, ATTN_DISPATCH_TEST_SANITIZE=flags)


def thread_checks() -> Iterable[Outcome]:
    checks = TESTS / "cuda_backend"
    yield from thread_check("cache", [checks / "once_cache.cc", BACKEND / "cudnn_failure.cc"])
    yield from thread_check("scopes", [checks / "cudnn_scope.cc", BACKEND / "cudnn_scope.cc"])


def planning_threads() -> Iterable[Outcome]:
    """Check threads that plan, with the stand-ins that the build of the CUDA library made."""
    checks = TESTS / "cuda_backend"
    unity = FOLDER / "with_frontend.cc"
    unity.write_text("".join(f'#include "{BACKEND / name}"\n' for name in WITH_FRONTEND))
    excluded = {*WITH_FRONTEND, *NEEDS_XLA_OR_PYTHON}
    sources = [unity, *(x for x in sorted(BACKEND.glob("*.cc")) if x.name not in excluded)]
    found = [sys.executable, str(BACKEND / "find_headers.py")]
    headers = subprocess.run(found, capture_output=True, text=True, check=True).stdout.split("\n")
    flags = [f"-isystem{x}" for x in headers if x]
    flags += ["-DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING", '-DATTN_SOURCES="sanitized"']
    flags += ["-Wl,--wrap=getenv", "-ldl"]
    for stand_in in (FOLDER / "cuda" / "cuda_backend").glob("libattn_dispatch_no_*.so"):
        (FOLDER / stand_in.name).unlink(missing_ok=True)
        (FOLDER / stand_in.name).symlink_to(stand_in)
    properties = ROOT / "dispatch" / "attn_dispatch" / "devices" / "targets" / "sm90.json"
    arguments = [_cudnn(), str(properties)]
    yield from thread_check("threads", [checks / "threads.cc", *sources], flags, arguments)


def thread_check(
    name: str, sources: list[Path], flags: Iterable[str] = (), arguments: Iterable[str] = ()
) -> Iterable[Outcome]:
    program = FOLDER / name
    build = [_compiler(), "-std=c++17", "-O1", *COMMON, *THREAD, "-pthread"]
    build += [f"-I{BACKEND}", f"-I{COMMON_BACKEND}"]
    build += [*map(str, sources), *flags, "-o", str(program)]
    options = f"suppressions={SITE / 'thread.supp'}"
    commands = [build, [str(program), *arguments]]
    yield run(f"{name}, TSan", commands, TSAN_OPTIONS=options, LD_LIBRARY_PATH=_cudnn_folder())


def pytest(tests: Tests, *, quick: bool, **environment: str) -> Outcome:
    chosen = []
    for name in tests.quick if quick else (*tests.quick, *tests.rest):
        file, _, test = name.partition("::")
        chosen += [f"{x}::{test}" if test else str(x) for x in sorted(TESTS.glob(file))]
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=5", "-p", "no:cacheprovider"]
    command += [f"-knot {tests.without}"] * bool(tests.without) + chosen
    # The sanitizer looks up how to throw exceptions when it starts, so libstdc++ is preloaded too.
    preloaded = " ".join(_runtime(x) for x in ("libasan.so", "libstdc++.so.6"))
    before = os.environ.get("PYTHONPATH")
    return run(
        f"{tests.name}, ASan + UBSan",
        [command],
        LD_PRELOAD=preloaded,
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        LD_LIBRARY_PATH=_cudnn_folder(),
        PYTHONPATH=os.pathsep.join([str(SITE), *([before] if before else [])]),
        ATTN_DISPATCH_TEST_FUZZ=str(tests.quick_draws if quick else tests.draws),
        **environment,
    )


def run(step: str, commands: list[list[str]], **environment: str) -> Outcome:
    """Run commands one after the other until one fails. The last one's output gives the counts."""
    began, text, passed = time.monotonic(), "", True
    for command in commands:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=STEP_SECONDS,
            )  # fmt: skip
            text, passed = done.stdout, done.returncode == 0
        except subprocess.TimeoutExpired:
            text, passed = f"not in {STEP_SECONDS:g} s", False
        if not passed:
            print(text, flush=True)
            break
    counted = re.search(r"\d+ passed.*?(?= in )", text)
    result = "failed" if not passed else counted[0] if counted else "passed"
    return Outcome(step, time.monotonic() - began, result, passed)


def summary(outcomes: list[Outcome], seconds: float, *, quick: bool) -> str:
    """The text of the page in tests/results."""
    version = _output_of([_compiler(), "--version"]).splitlines()[0]
    commit = _output_of(["git", "rev-parse", "--short", "HEAD"])
    rows = [f"| {x.step} | {x.result} | {x.seconds / 60:.1f} |" for x in outcomes]
    command = "make sanitize-quick" if quick else "make sanitize"
    lines = [
        "# Sanitizers", "",
        f"`{command}` at {commit}, {datetime.date.today():%Y-%m-%d}, {version}, "
        f"{os.cpu_count()} cores, {seconds / 60:.0f} minutes.",
        "", "| step | result | minutes |", "|---|---|---|", *rows, "",
    ]  # fmt: skip
    return "\n".join(lines)


def _cmake(optimization: str) -> list[str]:
    flags = " ".join(["-O1", *COMMON, *ADDRESS])
    oldest = Path(sys.prefix) / "oldest-jaxlib" / "jaxlib" / "include"
    if oldest.exists():
        os.environ.setdefault("ATTN_DISPATCH_INCLUDE", str(oldest))
    return [
        "cmake", "-S", str(ROOT), "-B", str(FOLDER / "cuda"), "-G", "Ninja",
        "-DATTN_DISPATCH_CUDA=ON", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CXX_FLAGS={flags}", f"-DATTN_PLANS_OPTIMIZATION={optimization}",
        f"-DCMAKE_CXX_COMPILER={_compiler()}",
    ]  # fmt: skip


def _ninja() -> list[str]:
    return ["ninja", "-C", str(FOLDER / "cuda")]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _runtime(name: str) -> str:
    return os.path.realpath(_output_of([_compiler(), f"-print-file-name={name}"]))


def _cudnn() -> str:
    code = "from attn_dispatch.cudnn import library; print(library._locate())"
    return _output_of([sys.executable, "-c", code])


def _cudnn_folder() -> str:
    """The folder of cuDNN's parts. Under sanitizers cuDNN does not look for them beside itself."""
    return os.path.dirname(_cudnn())


def _output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
