"""Runs JAX's tests of `jax.nn.dot_product_attention` with our call in its place.

    python -m tests.scripts.run_jax_tests --source jax         # a checkout of JAX
    python -m tests.scripts.run_jax_tests --fetch build/jax    # or clone the installed version's

--out FOLDER writes the counts as JSON.

Only a checkout of JAX has tests, neither its wheel nor its sdist. They run with the installed JAX,
which should have the checkout's version; beyond JAX they need absl-py and pytest.

The script runs every test of tests/nn_test.py that calls the function. Tests of cuDNN skip
themselves without an NVIDIA GPU. tests/fused_attention_stablehlo_test.py does not run: it tests a
private function with other arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax

import attn_dispatch
from attn_dispatch_tools.reports.environment import environment, file_name
from tests.scripts.jax_nn_replaced import MODES
from tests.support.repository import ROOT

REPOSITORY = "https://github.com/jax-ml/jax"
TESTS = Path("tests/nn_test.py")
_SELECTED = "DotProductAttention"


@dataclass(frozen=True)
class Outcome:
    """The result of one run of JAX's tests."""

    passed: int
    failed: int
    skipped: Counter[str]
    """The number of skipped tests, by reason."""
    text: str
    """The output of pytest."""

    def __str__(self) -> str:
        reasons = "".join(f"\n    skipped {n}: {reason}" for reason, n in self.skipped.items())
        return f"{self.passed} passed, {self.failed} failed{reasons}"


def run(source: Path, mode: str) -> Outcome:
    """Run the tests of a checkout of JAX in a new process.

    Args:
      source: the checkout.
      mode: one of `jax_nn_replaced.MODES`.
    """
    paths = [ROOT, Path(attn_dispatch.__file__).parents[1]]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        # JAX's tests make warnings errors. The plugin prints which implementation ran.
        "ATTN_DISPATCH_FALLBACK": "silent",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", str(TESTS), "-k", _SELECTED, "-q"]
        command += ["-p", "tests.scripts.jax_nn_replaced", f"--jax-nn={mode}"]
        command += ["-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}"]
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
        text = done.stdout + done.stderr
        if not report.exists():
            raise RuntimeError(f"pytest did not run JAX's tests:\n{text}")
        return _outcome(ElementTree.parse(report).getroot(), text)


def _outcome(report: ElementTree.Element, text: str) -> Outcome:
    cases = list(report.iter("testcase"))
    skips = [skip for case in cases for skip in case.iter("skipped")]
    failed = sum(case.find("failure") is not None or case.find("error") is not None
                 for case in cases)  # fmt: skip
    reasons = Counter(skip.get("message", "") for skip in skips)
    return Outcome(len(cases) - failed - len(skips), failed, reasons, text)


def fetch(folder: Path) -> None:
    """Clone the needed sources of the installed JAX, unless the folder exists.

    Raises:
      subprocess.SubprocessError: git has failed, and has printed the reason.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    clone = ["git", "clone", "--quiet", "--depth=1", "--filter=blob:none", "--no-checkout"]
    clone += [f"--branch=jax-v{jax.__version__}"]
    subprocess.run([*clone, REPOSITORY, unfinished], check=True, timeout=300)
    files = ["pyproject.toml", "conftest.py", str(TESTS)]
    subprocess.run(
        ["git", "-C", unfinished, "checkout", "--quiet", "HEAD", "--", *files], check=True
    )
    unfinished.rename(folder)


def installed_source() -> Path | None:
    """The checkout that JAX is installed from by `pip install --editable`, if there is one."""
    source = Path(jax.__file__).parents[1]
    return source if (source / TESTS).is_file() else None


def save(outcomes: dict[str, Outcome], source: Path, folder: Path) -> None:
    """Write the counts of each mode, and the hash of the tests."""
    facts = environment()
    counts = {
        mode: {"passed": x.passed, "failed": x.failed, "skipped": x.skipped}
        for mode, x in outcomes.items()
    }
    tests = hashlib.sha256((source / TESTS).read_bytes()).hexdigest()
    report = {"environment": facts, "sha256 of nn_test.py": tests, **counts}
    path = folder / f"{file_name('jax_tests', facts)}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run JAX's tests of dot_product_attention with this library's call."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--source", type=Path, help="a checkout of JAX")
    where.add_argument("--fetch", type=Path, metavar="FOLDER", help="clone JAX's sources into it")
    parser.add_argument("--only-fetch", action="store_true", help="clone without running tests")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the counts")
    arguments = parser.parse_args()
    source = arguments.fetch or arguments.source or installed_source()
    if arguments.fetch:
        try:
            fetch(arguments.fetch)
        except subprocess.SubprocessError:
            sys.exit(f"git cannot clone jax-v{jax.__version__} of {REPOSITORY}")
    if source is None or not (source / TESTS).is_file():
        parser.error(f"expected a checkout of JAX with {TESTS}, got {source}; see --help")
    if arguments.only_fetch:
        return 0
    outcomes = {mode: run(source, mode) for mode in MODES}
    for mode, outcome in outcomes.items():
        print(f"{outcome.text}\n{mode}: {outcome}\n")
    if arguments.out:
        save(outcomes, source, arguments.out)
    return int(any(x.failed or not x.passed for x in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
