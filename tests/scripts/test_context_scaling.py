"""benchmarks/context_scaling.py: its table, and measured times in place of modelled ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    found = re.findall(r"([\d.]+)(\*? \([^)]*\))", line)
    return [(float(x), y) for x, y in found]


def test_measured_times_replace_modelled_ones(tmp_path: Path):
    text = run("--out", str(tmp_path / "times.json"))
    assert len(text.splitlines()) == 2 + 2 + 2 + 6
    short, long = (cells(text, f"Llama 3 70B | {x} | full") for x in ("128k", "1M"))
    assert [x for x, _ in short] == sorted((x for x, _ in short), reverse=True)
    assert all(a < b for (a, _), (b, _) in zip(short, long, strict=True))
    assert "halo" in cells(text, "GPT-OSS 120B | 128k | window")[0][1]

    rows = json.loads((tmp_path / "times.json").read_text())
    by_devices = {
        x["devices"]: x for x in rows if x["model"] == "Llama 3 70B" and x["tokens"] == 131072
    }
    alone = by_devices[1]["forward_ms"] + by_devices[1]["backward_ms"]
    given = {x: by_devices[8][x] for x in ("model", "layer", "tokens", "devices")}
    given |= {"forward_ms": alone / 16, "backward_ms": alone / 16, "strategy": "ring"}
    (tmp_path / "measured.json").write_text(json.dumps([given]))
    measured = cells(
        run("--measured", str(tmp_path / "measured.json")), "Llama 3 70B | 128k | full"
    )
    assert measured[0][0] == 1 and measured[0][1].startswith("* (ring, ")
    assert measured[1:] == short[1:]

    (tmp_path / "measured.json").write_text(json.dumps([given | {"devices": 5}]))
    with pytest.raises(subprocess.CalledProcessError) as error:
        run("--measured", str(tmp_path / "measured.json"))
    assert (
        "expected cells of the table, got ('Llama 3 70B', 'full', 131072, 5)" in error.value.stderr
    )


def test_slower_links_scale_worse():
    fast, slow = (cells(run("--between", x), "Qwen2.5-7B | 128k | full") for x in ("100", "25"))
    assert fast[0] == slow[0]  # within a node
    assert all(a > b for (a, _), (b, _) in zip(fast[1:], slow[1:], strict=True))
