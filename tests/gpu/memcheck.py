"""Drawn calls under compute-sanitizer: does any kernel touch memory that is not its own?

usage: python tests/gpu/memcheck.py [--draws N] [--seed N] [--jobs N] [--results FOLDER]

Every buffer is an allocation of its own, so that reading or writing past one is noticed. Exits with
1 if anything was, or if nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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


def cases(count: int, seed: int) -> list[Any]:
    from attn_dispatch.conformance import draws

    return draws.examples(count, seed)


def run_part(count: int, seed: int, part: int, parts: int) -> None:
    """Runs every `parts`-th of the cases; prints the status of each."""
    from attn_dispatch.conformance.suite import Conformance

    suite = Conformance()
    suite.implementation = "cudnn"
    for case in cases(count, seed)[part::parts]:
        print("STATUS", case.name, suite.check(case).status, flush=True)


def checked(args: argparse.Namespace, part: int) -> dict[str, Any]:
    """A part under compute-sanitizer: the statuses, and the errors that it counted."""
    command = (
        "compute-sanitizer", "--tool", "memcheck", "--print-limit", "5",
        sys.executable, __file__, "--draws", str(args.draws), "--seed", str(args.seed),
        "--jobs", str(args.jobs), "--part", str(part),
    )  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, errors="replace"
    )
    said = done.stdout + done.stderr
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", said)
    return {
        "statuses": dict(re.findall(r"STATUS (\S+) (\w+)", said)),
        "errors": sum(map(int, errors)) if errors else None,
        "first_errors": re.findall(r"========= (Invalid .*|    at .*)", said)[:6],
        "exit_status": done.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Drawn calls under compute-sanitizer.")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--results", default="")
    parser.add_argument("--part", type=int)
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.draws, args.seed, args.part, args.jobs)
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        parts = list(pool.map(lambda part: checked(args, part), range(args.jobs)))
    statuses = {name: x for part in parts for name, x in part["statuses"].items()}
    ran = [x for x in statuses.values() if x != "refused"]
    is_clean = bool(ran) and all(part["errors"] == 0 for part in parts)
    print(f"{len(statuses)} of {args.draws} calls, {len(ran)} run; clean: {is_clean}")
    for part in parts:
        print(part["errors"], part["exit_status"], *part["first_errors"])
    if args.results:
        from attn_dispatch.conformance.environment import environment, file_name

        facts = environment()
        report = {"environment": facts, "draws": args.draws, "seed": args.seed, "clean": is_clean}
        report |= {"statuses": statuses, "parts": [x | {"statuses": None} for x in parts]}
        path = Path(args.results, f"{file_name('memcheck', facts)}.json")
        path.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
