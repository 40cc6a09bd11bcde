"""What a version is proven by, on all GPUs of a machine at once: drawn calls and the GPU suite.

usage: python tests/gpu/prove.py FOLDER [--seeds N ...] [--rewritten N ...] [--draws N] [--jobs N]
                                        [--named] [--suite]

Every seed draws calls of its own for `attn-dispatch verify`, on the GPUs in turn; those of
--rewritten under ATTN_DISPATCH_REWRITES=1. --named adds the named cases to the first seed's.
--suite runs the GPU suite on one GPU, and on two where there are, before the rest. Reports go to
FOLDER, and so does what each run printed that ended with an error. Exits with 1 if one did.
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

_SUITE = (
    sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), "-k", "not test_case",
)  # fmt: skip
"""`verify` runs the cases."""


@dataclass(frozen=True)
class Run:
    """One command, and what it needs."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def suites(folder: Path, count: int) -> Iterator[Run]:
    """The GPU suite on one GPU, then on two."""
    results = ("--results", str(folder))
    yield Run("gpu_suite", (*_SUITE, *results), {"CUDA_VISIBLE_DEVICES": "0"})
    if count > 1:
        two = ("--results-name", "gpu_suite-two")
        yield Run("gpu_suite-two", (*_SUITE, *results, *two), {"CUDA_VISIBLE_DEVICES": "0,1"})


def draws(args: argparse.Namespace, gpus: tuple[str, ...]) -> Iterator[Run]:
    """A `verify` for each seed."""
    seeds = [(seed, "0") for seed in args.seeds] + [(seed, "1") for seed in args.rewritten]
    for i, (seed, rewrites) in enumerate(seeds):
        options = {
            "--random": args.draws, "--seed": seed, "--jobs": args.jobs, "--report": args.folder,
            "--cases": "*" if args.named and not i else "found/*",
        }  # fmt: skip
        words = (str(word) for option in options.items() for word in option)
        yield Run(
            f"seed {seed}",
            (sys.executable, "-m", "attn_dispatch", "verify", *words),
            {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)], "ATTN_DISPATCH_REWRITES": rewrites},
        )


def run(one: Run, folder: Path) -> bool:
    """Whether it ended well."""
    started = time.monotonic()
    done = subprocess.run(
        one.command, env=os.environ | one.environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = time.monotonic() - started
    print(f"{one.name}: exit status {done.returncode} after {seconds:.0f} s", flush=True)
    print(*done.stdout.splitlines()[-3:], sep="\n", flush=True)
    if done.returncode:
        (folder / f"{one.name.replace(' ', '_')}.log").write_text(done.stdout)
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove a version on the GPUs that are here.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--rewritten", type=int, nargs="*", default=[])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--suite", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    gpus = devices()
    are_good = [run(x, args.folder) for x in (suites(args.folder, len(gpus)) if args.suite else ())]
    with ThreadPoolExecutor() as pool:
        are_good += pool.map(lambda x: run(x, args.folder), draws(args, gpus))
    sys.exit(0 if all(are_good) else 1)


if __name__ == "__main__":
    main()
