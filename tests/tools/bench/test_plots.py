"""Tables and plots of the benchmark's reports."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import attn_dispatch_tools.bench
from attn_dispatch_tools.bench import report, table
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.report import CellResults, Report
from tests.support.bench_cells import TINY, bench, row


@pytest.fixture
def saved(tmp_path) -> Path:
    """The file of a report with three peers, one of which has no packed sequences."""
    facts = {
        "device": "NVIDIA H200", "cudnn": "9.19.0", "jax": "0.11.2", "driver": "580", "commit": "c",
        "date": "2026-11-23", "peers": {"ours": "1", "fa4-jax": "2", "torch: cudnn": "3"},
        "absent": {"tokamax": "not installed: pip install tokamax"},
    }  # fmt: skip
    cells = []
    for cell in (*GRIDS["long"], *GRIDS["packed"][:1]):
        results = {
            x: {"ours": row(600, cell, x), "fa4-jax": row(580, cell, x)}
            for x in ("forward", "forward_backward")
        }
        refused = {"reason": "NotImplementedError: no <packed> sequences"}
        for x, found in results.items():
            found["torch: cudnn"] = refused if cell.lengths else row(640.5, cell, x)
        cells.append(CellResults(cell, results))
    path = tmp_path / "one.json"
    Report(facts, {}, cells, "time limit", ["dense: a cell"]).write(path)
    return path


def test_the_markdown_table_shows_times_and_reasons(saved):
    text = table.markdown(report.read([saved]))
    assert "NVIDIA H200" in text and "cuDNN 9.19.0, JAX 0.11.2, driver 580, 2026-11-23" in text
    assert "Stopped (time limit) with 1 cells not measured." in text
    assert "## long, forward, TFLOP/s\n\n|  | ours | fa4-jax | torch: cudnn |" in text
    lines = [x for x in text.splitlines() if x.startswith("| d128 causal, long b1 ")]
    assert [x.split()[5] for x in lines[:4]] == ["16k", "32k", "64k", "128k"]
    assert lines[0].endswith("| 600 | 580 | **640** |")
    assert "## packed, forward, µs\n\n|  | ours | fa4-jax |\n" in text
    us = GRIDS["packed"][0].forward_flops / 600e6
    assert f"| 16 documents, even b1 16k | **{us:.0f}** | " in text
    assert "| long: d128 causal, long b1 16k | 600 | 580 | 640 |" in text  # MiB
    assert "## packed, forward, µs of device time\n\n|  | ours | fa4-jax |\n" in text
    assert f"| 16 documents, even b1 16k | **{0.9 * us:.0f}** | " in text
    assert "| forward | 60 | 58 | 64 |" in text  # ms
    assert "- torch: cudnn: NotImplementedError: no &lt;packed> sequences (packed: 16 doc" in text
    assert "tokamax: not installed" in text


def test_plot_writes_pictures_and_the_table(saved, capsys, tmp_path):
    status, out, _ = bench(capsys, "--plot", str(saved), "--out", str(tmp_path / "plots"))
    assert status is None
    files = {x.name: x for x in (tmp_path / "plots").iterdir()}
    assert files.keys() == {
        "bars-long-d128_causal_long.svg", "lengths-long-d128_causal_long.svg",
        "memory-long-d128_causal_long.svg", "bars-packed.svg", "bench-NVIDIA_H200-9_19_0.md",
    }  # fmt: skip
    assert sorted(out.splitlines()) == sorted(str(x) for x in files.values())
    for name, path in files.items():
        if path.suffix != ".svg":
            continue
        root = ET.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = {"".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text")}
        peers = {"ours", "fa4-jax"} | ({"torch: cudnn"} if "packed" not in name else set())
        assert peers <= texts, name
        assert "NVIDIA H200, cuDNN 9.19.0, JAX 0.11.2, bfloat16" in texts
        assert ("torch: cudnn" in texts) == ("torch: cudnn" in peers)


def test_a_later_file_adds_cells_and_replaces_equal_ones(saved, tmp_path):
    data = json.loads(saved.read_text())
    data["cells"] = [x for x in data["cells"] if x["seq_len"] == 32768] + [TINY.to_json()]
    data["cells"][0]["results"]["forward"]["ours"]["tflops"] = 700.0
    commit, data["environment"]["commit"] = data["environment"]["commit"], "feed5eed"
    data["cells"][1] |= {"results": {}, "notes": {}}
    later = tmp_path / "two.json"
    later.write_text(json.dumps(data))
    both = report.read([saved, later])
    assert len(both.cells) == 6
    found = {x.cell.name: x.value("forward", "ours", "tflops") for x in both.cells}
    assert both.environment["commit"] == f"{commit}, feed5eed"
    assert found["d128 causal, long b1 32k"] == 700.0 and found["d128 causal, long b1 16k"] == 600
    data["environment"]["cudnn"] = "9.28.0"
    later.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"one\.json has cudnn 9\.19\.0, two\.json has 9\.28\.0"):
        report.read([saved, later])


def test_plot_with_html_writes_one_page_with_its_pictures(saved, capsys, tmp_path):
    pytest.importorskip("markdown_it")
    status, out, _ = bench(capsys, "--plot", str(saved), "--out", str(tmp_path / "p"), "--html")
    (page,) = (tmp_path / "p").glob("*.html")
    assert status is None and str(page) in out.splitlines()
    text = page.read_text()
    plots = [*(tmp_path / "p").glob("*.svg")]
    assert text.count("data:image/svg+xml;base64,") == len(plots) == 4
    assert "<h1>Attention on NVIDIA H200</h1>" in text and "<table>" in text


def test_without_matplotlib_the_error_names_the_extra(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "attn_dispatch_tools.bench.plots", raising=False)
    monkeypatch.delattr(attn_dispatch_tools.bench, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, _ = bench(capsys, "--plot", str(saved), "--out", str(tmp_path))
    assert "pip install matplotlib, or the extra [bench]" in str(status)


def test_plots_leave_out_what_is_ours_under_another_name(tmp_path):
    """Where two calls of a family run on different kernels, both are shown."""
    pytest.importorskip("matplotlib")
    facts = {"device": "D", "cudnn": "9", "jax": "0", "peers": {"ours": "1", "ours: flash": "1"}}
    cells = []
    for cell in (*GRIDS["gqa"], *GRIDS["window"]):
        tied = {"ours": row(600, cell, "forward"), "ours: flash": row(590, cell, "forward")}
        backward = "xla" if cell.grid == "window" else "flash"
        notes = {"ours": {"forward": "flash", "backward": backward}}
        cells.append(CellResults(cell, {"forward": tied}, notes))
    from attn_dispatch_tools.bench import plots

    written = plots.draw(Report(facts, {}, cells), tmp_path)
    both = {x.name for x in written if "flash" in x.read_text()}
    assert both == {"bars-window.svg"} and len(written) > 1
