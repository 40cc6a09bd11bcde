"""Runs AITER's ASM kernels, each by its smallest call or in drawn ones, in many orders of events.

usage: python -m tests.scripts.soak_cdna [--schedules N] [--minutes M] [--jobs N] [--out FILE]
                                         [--report FOLDER] [--drawn SEED NUMBER]

Kernels are those of the wheel, and of AITER's sources if ATTN_DISPATCH_AITER_DIR names a folder.
After --minutes no further call is begun; another run goes on where FILE ends. Calls as the front
end makes them come first, then those with roundings and sums that it never asks for, then those
that rules of ours keep from ASM. With --drawn they are as many drawn calls instead, of each
architecture and generation, with seeds from SEED on. --report writes counts as JSON. The exit
status is 1 if a kernel is wrong in a way that tests/support/cdna/defects.py does not have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from attn_dispatch_tools.reports.environment import environment
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from tests.support.cdna import generations
from tests.support.cdna.drawn_calls import drawn_run
from tests.support.cdna.kernel_calls import OURS
from tests.support.cdna.kernel_runs import KernelRun, outcome_of, runs

Record = dict[str, Any]
_DRAWN, _LIFTED = "drawn", "kept from calls by our rules"


class Job(NamedTuple):
    generation: str
    arch: str
    kind: str
    number: int
    """The seed of a drawn call; else the place in the list of calls."""


@cache
def _runs(generation: str, arch: str, lifted: bool) -> list[KernelRun]:
    return runs(generation, arch, lifted=lifted)


def _run(job: Job) -> KernelRun:
    if job.kind == _DRAWN:
        return drawn_run(job.generation, job.arch, job.number)
    return _runs(job.generation, job.arch, job.kind == _LIFTED)[job.number]


def _jobs(seeds: range) -> list[Job]:
    """The drawn calls of these seeds, or, without any, each kernel's calls in the order to run."""
    found: list[Job] = []
    for generation in generations.GENERATIONS:
        if missing := generations.missing(generation):
            print(missing)
            continue
        for arch in generations.ARCHS:
            found += [Job(generation, arch, _DRAWN, seed) for seed in seeds]
            for lifted in () if seeds else (False, True):
                for n, run in enumerate(_runs(generation, arch, lifted)):
                    kind = _LIFTED if lifted else "ours" if run.choice == OURS else "others"
                    found.append(Job(generation, arch, kind, n))
    order = (_DRAWN, "ours", "others", _LIFTED)
    return sorted(found, key=lambda x: order.index(x.kind))


def _worked(given: tuple[Job, int, float]) -> Record | None:
    """The record of a run, or None if it is too late to begin."""
    job, schedules, until = given
    if time.time() > until:
        return None
    run = _run(job)
    started = time.process_time()
    outcome = outcome_of(run, schedules)
    version = generations.release(job.generation).version
    return {
        "run": str(run), "kind": job.kind, "arch": run.arch, "schedules": schedules,
        "aiter": "dev18" if job.generation == "dev18" else f"v{'.'.join(map(str, version))}",
        "kernels": run.kernels, "seconds": round(time.process_time() - started, 2),
        **asdict(outcome),
    }  # fmt: skip


def _read(path: Path) -> dict[str, Record]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {f"{x['kind']} {x['run']}": x for x in map(json.loads, lines)}


def report(records: list[Record]) -> Record:
    """Counts of kernels and schedules by release, architecture and kind; and what was wrong."""
    found: dict[str, Record] = {}
    for name in sorted({(x["aiter"], x["arch"], x["kind"]) for x in records}):
        these = [x for x in records if (x["aiter"], x["arch"], x["kind"]) == name]
        counts = Counter[str]()
        for x in these:
            if x["kernels"]:
                counts["kernels"] += len(x["kernels"])
                counts["schedules_of_kernels"] += x["schedules"] * len(x["kernels"])
            counts["calls"] += 1
            for key in ("schedules", "right", "wrong", "timed_wrong", "conflicts"):
                counts[key] += x[key]
        cycles = [x["fewest_cycles"] for x in these if x["fewest_cycles"]]
        found[" ".join(name)] = {
            **counts,
            "fewest_cycles": min(cycles, default=None),
            "worst_of_the_right": round(max(x["worst"] for x in these), 3),
            "cpu_minutes": round(sum(x["seconds"] for x in these) / 60, 1),
            "not_explained": {x["run"]: x["problems"][0] for x in these if x["problems"]},
        }
    facts = environment()
    kept = {x: facts[x] for x in ("date", "commit", "jax", "python", "attn_dispatch")}
    return {"environment": kept, "kernels": found}


def _work(chosen: argparse.Namespace, jobs: list[Job]) -> None:
    """Add the records of runs that are not in the file with as many schedules."""
    done = {x for x, y in _read(chosen.out).items() if y["schedules"] >= chosen.schedules}
    left = [x for x in jobs if f"{x.kind} {_run(x)}" not in done]
    until = time.time() + 60 * chosen.minutes
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    # Worker processes read this when they import JAX.
    flags = (f"--{name}={str(value).lower()}" for name, value in COMPILE_QUICKLY.items())
    os.environ["XLA_FLAGS"] = " ".join(flags)
    with (
        multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool,
        chosen.out.open("a", encoding="utf-8") as out,
    ):
        for record in pool.imap(_worked, ((x, chosen.schedules, until) for x in left)):
            if record is not None:
                out.write(json.dumps(record) + "\n")
                out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/soak_cdna.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--drawn", type=int, nargs=2, default=(0, 0), metavar=("SEED", "NUMBER"))
    chosen = parser.parse_args()
    seed, number = chosen.drawn
    jobs = _jobs(range(seed, seed + number))
    _work(chosen, jobs)
    done = _read(chosen.out)
    print(f"{len(done)} of {len(jobs)} calls done")
    found = report(list(done.values()))
    if chosen.report:
        path = chosen.report / ("cdna_drawn_calls.json" if number else "cdna_kernels.json")
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["kernels"], indent=1))
    sys.exit(any(x["problems"] for x in done.values() if x["kind"] != _LIFTED))


if __name__ == "__main__":
    main()
