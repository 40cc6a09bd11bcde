"""Drawn calls under compute-sanitizer: does any kernel touch memory that is not its own?

usage: python tests/gpu/memcheck.py [--draws N] [--seed N] [--jobs N] [--out FOLDER]

Every buffer is an allocation of its own, so that reading or writing past one is noticed. Each call
has a process of its own, and 100 seconds: the sanitizer itself may crash or hang, which is then
said of that call. The jobs share out the GPUs that are here. Exits with 1 if a call touched what
is not its own, or if none ran.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "ATTN_DISPATCH_POISON": "1",
}

_MEMCHECK = (
    "compute-sanitizer", "--tool", "memcheck", "--print-limit", "5",
    # Of this process alone: the sanitizer crashes beside the compilers that XLA starts.
    "--target-processes", "application-only",
    # What the driver refuses is no access to memory: cuDNN tries calls, and goes on without them.
    "--report-api-errors", "no",
)  # fmt: skip

_LONGEST = 100
"""Seconds for one call; most take 10 to 20."""


def run_one(count: int, seed: int, index: int) -> None:
    """Runs one of the drawn cases and prints its status."""
    from attn_dispatch_tools.verify import draws
    from attn_dispatch_tools.verify.suite import Conformance

    suite = Conformance()
    suite.implementation = "cudnn"
    print("STATUS", suite.check(draws.examples(count, seed)[index]).status, flush=True)


@functools.cache
def devices() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES may name, one by one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(visible.split(","))
    if not shutil.which("nvidia-smi"):
        sys.exit("error: no NVIDIA GPU is here")
    listed = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True).stdout
    return tuple(map(str, range(len(listed.splitlines()))))


def checked(args: argparse.Namespace, index: int) -> dict[str, Any]:
    """One call under compute-sanitizer: its status, and the errors that were counted."""
    command = (
        *_MEMCHECK, sys.executable, __file__, "--draws", str(args.draws), "--seed", str(args.seed),
        "--one", str(index),
    )  # fmt: skip
    device = {"CUDA_VISIBLE_DEVICES": devices()[index % len(devices())]}
    process = subprocess.Popen(
        command, env=os.environ | _ENVIRONMENT | device, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    status = re.search(r"STATUS (\w+)", said)
    summed = re.search(r"ERROR SUMMARY: (\d+) error", said)
    found = re.findall(r"========= (Invalid .*|    at .*)", said)
    return {
        "case": f"drawn/{args.seed}_{index}",
        "status": status[1] if status else "unfinished",
        # Errors are printed as they happen; their sum only at the end.
        "errors": int(summed[1]) if summed else (len(found) or None),
        "first_errors": found[:6],
        "exit_status": process.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Drawn calls under compute-sanitizer.")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", default="")
    parser.add_argument("--one", type=int)
    args = parser.parse_args()
    if args.one is not None:
        run_one(args.draws, args.seed, args.one)
        return
    facts = facts_of(args) if args.out else {}
    calls: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        # Told as they end, so that a run that is cut off has shown something.
        for call in pool.map(lambda index: checked(args, index), range(args.draws)):
            calls.append(call)
            print(f"{call['case']}: {call['status']}, errors: {call['errors']}", flush=True)
            if facts:
                report(Path(args.out), facts, calls)
    counts = counted(calls)
    print(
        f"{len(calls)} calls:", ", ".join(f"{x.replace('_', ' ')} {y}" for x, y in counts.items())
    )
    for call in unclean(calls):
        print(call)
    sys.exit(0 if counts["clean"] and not counts["not_clean"] else 1)


def kind(call: dict[str, Any]) -> str:
    """What a call counts as."""
    if call["status"] == "refused":
        return "refused"
    if call["errors"] is None:
        return "sanitizer_crashed_or_hung"
    return "clean" if call["status"] == "passed" and not call["errors"] else "not_clean"


def counted(calls: list[dict[str, Any]]) -> dict[str, int]:
    """How many calls there are of each kind."""
    found = Counter(map(kind, calls))
    kinds = ("clean", "refused", "not_clean", "sanitizer_crashed_or_hung")
    return {x: found[x] for x in kinds}


def unclean(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that were not clean, and those of which it is not known."""
    return [x for x in calls if kind(x) in ("not_clean", "sanitizer_crashed_or_hung")]


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """What a report begins with."""
    from attn_dispatch_tools.reports.environment import environment
    from attn_dispatch_tools.verify import draws

    cases = draws.examples(args.draws, args.seed)
    return {
        "environment": environment(), "draws": args.draws, "seed": args.seed,
        "paged": [x.name for x in cases if x.page],
        "packed": [x.name for x in cases if x.q_segments is not None or x.cu_q is not None],
    }  # fmt: skip


def kept(facts: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written of these calls: counts, and the unclean ones whole."""
    clean = {x["case"] for x in calls if kind(x) == "clean"}
    of_kind = {
        name: {"drawn": len(facts[name]), "clean": len(clean.intersection(facts[name]))}
        for name in ("paged", "packed")
    }
    return facts | of_kind | counted(calls) | {"unclean": unclean(calls)}


def report(folder: Path, facts: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """Writes what is known of these calls."""
    from attn_dispatch_tools.reports.environment import file_name

    path = folder / f"{file_name('memcheck', facts['environment'])}.json"
    path.write_text(json.dumps(kept(facts, calls), indent=1) + "\n")


if __name__ == "__main__":
    main()
