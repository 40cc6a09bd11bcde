"""The repository stays small, and results of runs are kept as counts."""

import subprocess

import pytest

from tests.support.repository import ROOT

_MB = 10**6


def test_tracked_files_and_results_stay_below_their_limits():
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    paths = [ROOT / x for x in listed.stdout.split("\0") if x]
    sizes = {x: x.stat().st_size for x in paths if x.is_file()}
    results = sum(size for x, size in sizes.items() if "results" in x.relative_to(ROOT).parts)
    assert results <= 3 * _MB, "run python -m tests.scripts.keep_reports tests/gpu/results"
    largest = sorted(sizes, key=lambda x: -sizes[x])[:5]
    assert sum(sizes.values()) <= 9.2 * _MB, f"the largest files: {largest}"
