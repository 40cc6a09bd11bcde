"""The table of benchmarks/context_scaling.py."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.repository import ROOT


def run(*arguments: str) -> str:
    script = ROOT / "benchmarks" / "context_scaling.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def cells(text: str, start: str) -> list[tuple[float, str]]:
    """Efficiency and text behind it of each column of the row that starts so."""
    (line,) = (x for x in text.splitlines() if x.startswith(f"| {start} |"))
    found = re.findall(r"([\d.]+)( \([^)]*\))", line)
    return [(float(x), y) for x, y in found]


def test_longer_sequences_scale_further():
    text = run()
    assert len(text.splitlines()) == 2 + 2 + 2 + 6
    short, long = (cells(text, f"Llama 3 70B | {x} | full") for x in ("128k", "1M"))
    assert [x for x, _ in short] == sorted((x for x, _ in short), reverse=True)
    assert all(a < b for (a, _), (b, _) in zip(short, long, strict=True))
    assert "halo" in cells(text, "GPT-OSS 120B | 128k | window")[0][1]


def test_slower_links_scale_worse():
    fast, slow = (cells(run("--between", x), "Qwen2.5-7B | 128k | full") for x in ("100", "25"))
    assert fast[0] == slow[0]  # within a node
    assert all(a > b for (a, _), (b, _) in zip(fast[1:], slow[1:], strict=True))
