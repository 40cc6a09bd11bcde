"""Runs drawn calls under compute-sanitizer, which finds accesses outside of buffers.

usage: python tests/gpu/memcheck.py [--implementation NAME] [--masks | --wide] [--draws N]
                                    [--seed N] [--jobs N] [--out FOLDER]

Every buffer is a separate allocation, so that an access past its end is noticed. Each call runs in
a separate process with a limit of 100 seconds: the sanitizer itself may crash or hang, which is
then reported for that call. The jobs are spread over the GPUs of the machine. The exit status is 1
if a call accessed other memory, or if no call ran.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch_tools.verify.case import Case

_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "ATTN_DISPATCH_POISON": "1",
}

_MEMCHECK = (
    "compute-sanitizer", "--tool", "memcheck", "--print-limit", "5",
    # Only this process is checked: the sanitizer crashes in the compilers that XLA starts.
    "--target-processes", "application-only",
    # Errors of the driver are not accesses to memory: cuDNN tries calls that the driver refuses.
    "--report-api-errors", "no",
)  # fmt: skip

_CALL_SECONDS = 100
"""The time limit of one call; most take 10 to 20 seconds."""


def run_one(args: argparse.Namespace) -> None:
    """Run one of the drawn cases, and print its status and its failures."""
    from attn_dispatch_tools.verify.suite import Conformance

    suite = Conformance()
    suite.implementation = args.implementation
    outcome = suite.check(drawn(args)[args.one])
    print("STATUS", outcome.status, *(f"\nFAILED {x}" for x in outcome.failures), flush=True)


def drawn(args: argparse.Namespace) -> list[Case]:
    """The cases of a run."""
    from attn_dispatch_tools.verify import draws, mask_draws, wide_cases

    examples = wide_cases.wide_examples if args.wide else draws.examples
    examples = mask_draws.mask_examples if args.masks else examples
    return examples(args.draws, args.seed)


@functools.cache
def devices() -> tuple[str, ...]:
    """The names of the GPUs for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(visible.split(","))
    if not shutil.which("nvidia-smi"):
        sys.exit("error: this machine has no NVIDIA GPU")
    listed = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True).stdout
    return tuple(map(str, range(len(listed.splitlines()))))


def checked(args: argparse.Namespace, index: int, name: str) -> dict[str, Any]:
    """Run the call at this index, which has this name, under compute-sanitizer.

    Returns its status, its failures and the number of errors.
    """
    command = (
        *_MEMCHECK, sys.executable, __file__, "--draws", str(args.draws), "--seed", str(args.seed),
        "--one", str(index), "--implementation", args.implementation,
        *(["--masks"] if args.masks else []), *(["--wide"] if args.wide else []),
    )  # fmt: skip
    device = {"CUDA_VISIBLE_DEVICES": devices()[index % len(devices())]}
    process = subprocess.Popen(
        command, env=os.environ | _ENVIRONMENT | device, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_CALL_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    status = re.search(r"STATUS (\w+)", output)
    summed = re.search(r"ERROR SUMMARY: (\d+) error", output)
    found = re.findall(r"========= (Invalid .*|    at .*)", output)
    return {
        "case": name,
        "status": status[1] if status else "unfinished",
        "failures": re.findall(r"^FAILED (.*)", output, re.MULTILINE)[:3],
        # Errors are printed as they happen, their sum only at the end.
        "errors": int(summed[1]) if summed else (len(found) or None),
        "first_errors": found[:6],
        "exit_status": process.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Drawn calls under compute-sanitizer.")
    parser.add_argument("--implementation", default="cudnn")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--masks", action="store_true", help="draw only calls with masks")
    kind.add_argument("--wide", action="store_true", help="draw only head dims from 257 to 512")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", default="")
    parser.add_argument("--one", type=int)
    args = parser.parse_args()
    if args.one is not None:
        run_one(args)
        return
    cases = drawn(args)
    facts = facts_of(args, cases) if args.out else {}
    calls: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        # Each result is printed at once, so that an interrupted run has shown some.
        for call in pool.map(lambda x: checked(args, x[0], x[1].name), enumerate(cases)):
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
    """The kind of result by which a call is counted."""
    if call["status"] == "refused":
        return "refused"
    if call["errors"] is None:
        return "sanitizer_crashed_or_hung"
    return "clean" if call["status"] == "passed" and not call["errors"] else "not_clean"


def counted(calls: list[dict[str, Any]]) -> dict[str, int]:
    """The number of calls of each kind."""
    found = Counter(map(kind, calls))
    kinds = ("clean", "refused", "not_clean", "sanitizer_crashed_or_hung")
    return {x: found[x] for x in kinds}


def unclean(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that were not clean, and those without a result."""
    return [x for x in calls if kind(x) in ("not_clean", "sanitizer_crashed_or_hung")]


def facts_of(args: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    """The first entries of a report."""
    from attn_dispatch_tools.reports.environment import environment

    return {
        "environment": environment(), "implementation": args.implementation, "masks": args.masks,
        "wide": args.wide, "draws": args.draws, "seed": args.seed,
        "paged": [x.name for x in cases if x.page],
        "packed": [x.name for x in cases if x.q_segments is not None or x.cu_q is not None],
    }  # fmt: skip


def kept(facts: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of these calls: counts, and every unclean call completely."""
    clean = {x["case"] for x in calls if kind(x) == "clean"}
    by_layout = {
        name: {"drawn": len(facts[name]), "clean": len(clean.intersection(facts[name]))}
        for name in ("paged", "packed")
    }
    return facts | by_layout | counted(calls) | {"unclean": unclean(calls)}


def report(folder: Path, facts: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """Write the report of these calls."""
    from attn_dispatch_tools.reports.environment import file_name

    name = facts["implementation"]
    prefix = "memcheck" if name == "cudnn" else f"memcheck-{name}"
    prefix += "-wide" * facts["wide"]
    path = folder / f"{file_name(prefix, facts['environment'])}.json"
    path.write_text(json.dumps(kept(facts, calls), indent=1) + "\n")


if __name__ == "__main__":
    main()
