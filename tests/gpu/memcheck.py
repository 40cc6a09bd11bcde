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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "ATTN_DISPATCH_POISON": "1",
}

_LONGEST = 100
"""Seconds for one call; most take 10 to 20."""


def run_one(count: int, seed: int, index: int) -> None:
    """Runs one of the drawn cases and prints its status."""
    from attn_dispatch.conformance import draws
    from attn_dispatch.conformance.suite import Conformance

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
        "compute-sanitizer", "--tool", "memcheck", "--print-limit", "5",
        sys.executable, __file__, "--draws", str(args.draws), "--seed", str(args.seed),
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
    counted = re.search(r"ERROR SUMMARY: (\d+) error", said)
    found = re.findall(r"========= (Invalid .*|    at .*)", said)
    return {
        "case": f"{args.seed}_{index}",
        "status": status[1] if status else "unfinished",
        # Errors are printed as they happen; their sum only at the end.
        "errors": int(counted[1]) if counted else (len(found) or None),
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
    with ThreadPoolExecutor(args.jobs) as pool:
        calls = []
        for call in pool.map(lambda index: checked(args, index), range(args.draws)):
            calls.append(call)  # printed at once: a run that is cut off has shown something
            print(f"{call['case']}: {call['status']}, errors: {call['errors']}", flush=True)
    clean = [x for x in calls if x["errors"] == 0 and x["status"] == "passed"]
    refused = [x for x in calls if x["status"] == "refused"]
    unknown = [x for x in calls if x["errors"] is None and x not in refused]
    bad = [x for x in calls if x not in (*clean, *refused, *unknown)]
    print(
        f"{len(calls)} calls: {len(clean)} clean, {len(refused)} refused, {len(bad)} not clean, "
        f"{len(unknown)} of which the sanitizer said nothing"
    )
    for call in bad + unknown:
        print(call)
    if args.out:
        from attn_dispatch.conformance.environment import environment, file_name

        facts = environment()
        counts = {"clean": len(clean), "refused": len(refused), "not_clean": len(bad)}
        counts["sanitizer_crashed_or_hung"] = len(unknown)
        report = {"environment": facts, "draws": args.draws, "seed": args.seed, **counts}
        path = Path(args.out, f"{file_name('memcheck', facts)}.json")
        path.write_text(json.dumps(report | {"calls": calls}, indent=1) + "\n")
    sys.exit(0 if clean and not bad else 1)


if __name__ == "__main__":
    main()
