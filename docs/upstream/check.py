"""Applies a patch to a copy of a trainer's source, and runs the trainer's tests before and after.

    python docs/upstream/check.py axlearn SOURCE --python VENV/bin/python --work FOLDER

SOURCE is a checkout of the trainer, which is not changed. VENV has what its tests import and what
attn_dispatch needs. Three runs are compared test by test: the source as it is, the patched copy,
and in that copy the tests with attn_dispatch in place of another attention (trainers.py says
where). The exit status is 1 if a test that passed before the patch does not pass after it.
"""

import argparse
import collections
import json
import os
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from trainers import TRAINERS, Trainer

HERE = Path(__file__).resolve().parent
RUNS = ("before", "after", "ours")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "--python", default=sys.executable, help="Python with the trainer's packages"
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder for copies and results")
    parser.add_argument("--tests", nargs="+", help="only these test files of the trainer")
    parser.add_argument("-k", default="", help="only some tests, as in pytest")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="only these runs")
    parser.add_argument("--gpu", action="store_true", help="run on the GPU, not on the CPU")
    parser.add_argument("--options", default="", help="further options of pytest: '-n 8'")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    given = parser.parse_args()
    if (found := shutil.which(given.python)) is None:
        parser.error(f"--python: expected a Python, got {given.python}")
    python = os.path.abspath(found)  # tests run in other folders

    trainer = TRAINERS[given.trainer]
    tests = given.tests or list(trainer.tests)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    plain, patched = work / "plain", work / "patched"
    for copy in (plain, patched):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(given.source, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    with (HERE / trainer.patch).open() as patch:
        subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=patched, stdin=patch, check=True)

    def results(name: str, folder: Path, tests: list[str]) -> dict[str, str]:
        report = work / f"{name}.xml"
        report.unlink(missing_ok=True)
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *trainer.options]
        command += shlex.split(given.options)
        with (work / f"{name}.log").open("w") as log:
            subprocess.run(
                [*command, "-k", given.k, *tests],
                cwd=folder,
                env=environment(trainer, folder, given.gpu),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return read(report)

    runs: dict[str, dict[str, str]] = {}
    if "before" in given.runs:
        runs["before"] = results("before", plain, tests)
    if "after" in given.runs:
        runs["after"] = results("after", patched, tests)
    if "ours" in given.runs and (swapped := write_swapped(trainer, patched, tests)):
        ours = results("ours", patched, swapped)
        runs["ours"] = {test.replace("_ours_test", "_test"): x for test, x in ours.items()}
    for run, outcomes in runs.items():
        print(f"{run:<7}", dict(collections.Counter(outcomes.values())))
    differences = find_differences(runs)
    for test, by_run in differences.items():
        print(f"  {test}: {by_run}")
    if given.out:
        report = {
            "environment": facts(python, environment(trainer, work, given.gpu)),
            "tests": tests,
            **{run: dict(collections.Counter(x.values())) for run, x in runs.items()},
            "differences": differences,
        }
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    passed_before = [x for x in differences.values() if x.get("before") == "passed"]
    return int("after" in runs and any(x["after"] != "passed" for x in passed_before))


def environment(trainer: Trainer, folder: Path, on_gpu: bool) -> dict[str, str]:
    paths = [str(folder / x) for x in trainer.paths]
    paths += [str(HERE), str(HERE.parent.parent / "dispatch")]
    if given := os.environ.get("PYTHONPATH"):
        paths.append(given)
    platform = {} if on_gpu else {"JAX_PLATFORMS": "cpu"}
    return {
        **os.environ,
        **platform,
        "PYTHONPATH": os.pathsep.join(paths),
        "ATTN_STAND_INS": ",".join(trainer.stand_ins),
    }


def read(report: Path) -> dict[str, str]:
    """The outcome of each test in a report of pytest."""
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {x.tag for x in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}.{case.get('name')}"
        outcomes[name] = kinds.pop() if kinds else "passed"
    return outcomes


def write_swapped(trainer: Trainer, folder: Path, tests: list[str]) -> list[str]:
    """Write copies of test files, with attn_dispatch in place of another attention."""
    written = []
    for test in tests:
        if not (swaps := trainer.swaps.get(test)):
            continue
        text = (folder / test).read_text()
        for old, new in swaps:
            if old not in text:
                raise ValueError(f"{test}: expected {old!r} in this file")
            text = text.replace(old, new)
        copy = test.replace("_test.py", "_ours_test.py")
        (folder / copy).write_text(text)
        written.append(copy)
    return written


def find_differences(runs: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The tests whose outcomes differ between runs. The run "ours" has only some of the tests."""
    differences = {}
    for test in sorted(set().union(*runs.values())):
        by_run = {
            run: outcomes.get(test, "not there")
            for run, outcomes in runs.items()
            if run != "ours" or test in outcomes
        }
        if len(set(by_run.values())) > 1:
            differences[test] = by_run
    return differences


def facts(python: str, environment: dict[str, str]) -> dict[str, str]:
    """The date, device and versions in the environment of that Python."""
    code = (
        "import json; from attn_dispatch_tools.reports.environment import environment;"
        "print(json.dumps(environment()))"
    )
    run = subprocess.run([python, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


if __name__ == "__main__":
    sys.exit(main())
