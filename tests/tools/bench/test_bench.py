"""The `attn-dispatch bench` command: its runs, its limits, and wrong arguments."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import pytest

from attn_dispatch_tools.bench import measure, report, run, screen
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.measure import Options
from attn_dispatch_tools.bench.peers import all_peers, named
from attn_dispatch_tools.bench.report import CellResults, Report
from tests.support.bench_cells import QUICK, TINY, WINDOW, bench, ours


def test_a_run_prints_each_cell_and_writes_a_report(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(GRIDS, "small", (TINY, WINDOW))
    status, out, _ = bench(
        capsys, "--grid", "small", "--peer", "ours", "--peer", "jax.nn*", "--rounds", "1",
        "--seconds", "0.0001", "--out", str(tmp_path / "made"),
    )  # fmt: skip
    assert status == 0
    assert "absent: jax.nn: cudnn: cuDNN runs on NVIDIA GPUs, and this is cpu" in out
    assert "\neach line: forward / forward_backward, - where there is no number\n" in out
    (line,) = (x for x in out.splitlines() if x.startswith("[2/2] "))
    assert re.match(r"\[2/2\] window: tiny window b2 16: ours [\d.e-]+/[\d.e-]+, jax", line)
    assert line.endswith(" TFLOP/s")
    (path,) = (tmp_path / "made").iterdir()
    assert out.splitlines()[-1] == str(path)
    data = json.loads(path.read_text())
    assert data["stopped"] == "" and data["not_measured"] == []
    assert data["environment"]["peers"]["jax.nn: xla"] == f"jax {jax.__version__}"
    assert data["cells"][0]["notes"]["ours"] == {"forward": "xla", "backward": "xla"}
    assert data["cells"][0]["results"].keys() == {"forward", "forward_backward"}
    assert report.read([path]).peers == ["ours", "jax.nn: xla"]


def test_the_last_table_counts_the_cells_in_which_a_peer_was_fastest(capsys):
    cells = []
    for number, (ours_us, theirs_us) in enumerate([(1.0, 2.0), (3.0, 2.0), (1.0, None)]):
        found = CellResults(replace(TINY, seq_len=8 << number))
        times = {"ours": ours_us, "jax.nn: xla": theirs_us}
        rows = {x: {"wall_us": {"median": y}} if y else {"reason": "no"} for x, y in times.items()}
        found.results["forward"] = rows
        cells.append(found)
    screen.show(Report({"peers": dict.fromkeys(("ours", "jax.nn: xla"), "1")}, {}, cells))
    lines = [x.split("  ") for x in capsys.readouterr().out.splitlines()]
    rows = [[y.strip() for y in x if y] for x in lines if len(x) > 2]
    assert rows == [["peer", "cells", "forward"], ["ours", "3", "2"], ["jax.nn: xla", "2", "1"]]


def test_a_run_does_not_overwrite_an_earlier_report(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(GRIDS, "small", (TINY, replace(TINY, family="d16 causal", head_dim=16)))
    words = "--grid small --peer ours --rounds 1 --seconds 0.0001 --out".split()
    for cells in ("d8*", "d16*"):
        assert bench(capsys, *words, str(tmp_path), "--cells", cells)[0] == 0
    first, second = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert second.name == f"{first.stem}-2.json"
    assert "d8 causal" in first.read_text() and "d16 causal" in second.read_text()


def test_the_time_limit_stops_a_run_and_saves_its_report(tmp_path):
    calls = []

    def slow(cell, direction, peers, arrays, options):
        calls.append((cell, direction))
        is_over.append(True)
        return {"ours": {"wall_us": {"median": 1.0}, "tflops": 1.0}}

    is_over: list[bool] = []

    class Limited(Options):
        def is_over(self) -> bool:
            return bool(is_over)

    _, facts = run.present([])
    kept, path = Report(facts, {}), tmp_path / "x.json"
    done = list(run.run([TINY, WINDOW], [], ["forward"], Limited(), kept, path, slow))
    assert [x.cell for x in done] == [TINY] and calls == [(TINY, "forward")]
    data = json.loads(path.read_text())
    assert data["stopped"] == "time limit"
    assert data["not_measured"] == ["window: tiny window b2 16"]
    assert [x["family"] for x in data["cells"]] == ["d8 causal"]


def test_an_interrupted_run_saves_its_report(tmp_path):
    def interrupted(cell, *rest):
        if cell is WINDOW:
            raise KeyboardInterrupt
        return {}

    _, facts = run.present([])
    kept, path = Report(facts, {}), tmp_path / "x.json"
    assert len(list(run.run([TINY, WINDOW], [], ["forward"], QUICK, kept, path, interrupted))) == 1
    data = json.loads(path.read_text())
    assert data["stopped"] == "interrupted" and data["not_measured"] == [
        "window: tiny window b2 16"
    ]


def test_nothing_is_measured_after_the_time_limit():
    found = measure.measure(TINY, "forward", [ours()], CellArrays(TINY), Options(deadline=0.0))
    assert found == {"ours": {"reason": "not measured: the time limit was reached"}}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--grid", "huge"], "invalid choice: 'huge'"),
        (["--rounds", "0"], "expected more than 0, got 0"),
        (["--seconds", "x"], "expected a number, got 'x'"),
        (["--direction", "sideways"], "invalid choice"),
        (["--plot"], "expected at least one argument"),
    ],
)
def test_wrong_arguments_are_refused_by_the_parser(capsys, arguments, message):
    status, _, err = bench(capsys, *arguments)
    assert status == 2 and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--peer", "nobody"], "--peer: expected a pattern for ours, ours: cudnn, "),
        (["--cells", "nothing*"], "is named like 'nothing*'"),
        (["--out", __file__], "--out: expected a folder"),
        (["--plot", "/nowhere.json"], "expected a JSON file, got /nowhere.json"),
        (["--plot", __file__], "expected the JSON file of `attn-dispatch bench`"),
    ],
)
def test_wrong_values_end_with_an_error(capsys, arguments, message):
    status, _, _ = bench(capsys, *arguments)
    assert str(status).startswith("error: ") and message in str(status)


def test_help_names_options_and_grids(capsys):
    status, out, _ = bench(capsys, "--help")
    assert status == 0
    assert all(x in out for x in ("--grid", "--time-limit", "--torch-python", "--plot", *GRIDS))


def test_a_pattern_that_takes_minutes_to_parse_matches_no_peer():
    with pytest.raises(ValueError, match="expected a pattern for"):
        named(["[" * 100_000], all_peers())


def test_cells_may_be_named_by_several_patterns(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(GRIDS, "small", (TINY, WINDOW, replace(TINY, family="d16 causal")))
    words = "--grid small --peer ours --rounds 1 --seconds 0.0001 --out".split()
    status, out, _ = bench(capsys, *words, str(tmp_path), "--cells", "tiny*", "--cells", "d16*")
    assert status == 0 and "[1/2] window: tiny window" in out and "[2/2] tiny: d16" in out
    status, _, _ = bench(capsys, *words, str(tmp_path), "--cells", "tiny*", "--cells", "no*")
    assert "is named like 'no*'" in str(status)
