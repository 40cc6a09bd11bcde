"""Runs the proof of a version on all GPUs of a machine at once: drawn calls and the GPU suite.

usage: python tests/gpu/prove.py FOLDER [--seeds N ...] [--as-they-are N ...] [--each-rewrite N ...]
                                        [--draws N] [--jobs N] [--named] [--suite]

Every seed is one run of `attn-dispatch verify` with drawn calls, on the GPUs in turn: --seeds with
ATTN_DISPATCH_REWRITES=1, --as-they-are with ATTN_DISPATCH_REWRITES=0, and --each-rewrite with each
call also rewritten without need. --named adds the named cases to the first seed's run.

--suite runs the GPU suite alone on the first GPU, since some tests measure its memory. Then it runs
the tests that need two GPUs, while draws run. Reports go to FOLDER, and so does the output of every
run that failed. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from memcheck import devices

_TESTS = Path(__file__).parent
_PYTEST = (sys.executable, "-m", "pytest", "-q", "--out")


@dataclass(frozen=True)
class Run:
    """One command and its environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def suite(folder: Path, gpu: str) -> Run:
    """The GPU suite without the cases, which `verify` runs."""
    words = (str(folder), str(_TESTS), "-k", "not test_case")
    return Run("gpu_suite", (*_PYTEST, *words), {"CUDA_VISIBLE_DEVICES": gpu})


def suite_of_two(folder: Path, gpus: tuple[str, ...]) -> Run:
    """The tests of the GPU suite that need two GPUs."""
    words = (str(folder), "--out-name", "gpu_suite-two", str(_TESTS / "test_several_gpus.py"))
    return Run("gpu_suite-two", (*_PYTEST, *words), {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:2])})


def draws(args: argparse.Namespace, gpus: tuple[str, ...]) -> Iterator[Run]:
    """A run of `verify` for each seed, on the last GPU first."""
    seeds = [(seed, "1", ()) for seed in args.seeds]
    seeds += [(seed, "0", ()) for seed in args.as_they_are]
    seeds += [(seed, "1", ("--each-rewrite",)) for seed in args.each_rewrite]
    for i, (seed, rewrites, flags) in enumerate(seeds):
        options = {
            "--random": args.draws, "--seed": seed, "--jobs": args.jobs, "--out": args.folder,
            "--cases": "*" if args.named and not i else "found/*",
        }  # fmt: skip
        words = (str(word) for option in options.items() for word in option)
        yield Run(
            f"seed {seed}",
            (sys.executable, "-m", "attn_dispatch", "verify", *words, *flags),
            {"CUDA_VISIBLE_DEVICES": gpus[-1 - i % len(gpus)], "ATTN_DISPATCH_REWRITES": rewrites},
        )


def run(job: Run, folder: Path) -> bool:
    """Run a command. Returns whether its exit status is 0."""
    started = time.monotonic()
    done = subprocess.run(
        job.command, env=os.environ | job.environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = time.monotonic() - started
    print(f"{job.name}: exit status {done.returncode} after {seconds:.0f} s", flush=True)
    print(*done.stdout.splitlines()[-3:], sep="\n", flush=True)
    if done.returncode:
        (folder / f"{job.name.replace(' ', '_')}.log").write_text(done.stdout)
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove a version on the GPUs of this machine.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--as-they-are", type=int, nargs="*", default=[])
    parser.add_argument("--each-rewrite", type=int, nargs="*", default=[])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--suite", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    gpus = devices()
    runs = list(draws(args, gpus))
    later = [x for x in runs if args.suite and x.environment["CUDA_VISIBLE_DEVICES"] == gpus[0]]
    with ThreadPoolExecutor(len(runs) + 1) as pool:
        done = [pool.submit(run, x, args.folder) for x in runs if x not in later]
        if args.suite:
            succeeded = [run(suite(args.folder, gpus[0]), args.folder)]
            later += [suite_of_two(args.folder, gpus)] * (len(gpus) > 1)
        else:
            succeeded = []
        done += [pool.submit(run, x, args.folder) for x in later]
        succeeded += [x.result() for x in done]
    sys.exit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    main()
