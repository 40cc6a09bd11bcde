"""The `attn-dispatch bench` command: what is counted, who is absent, how turns go, the plots."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch_tools.bench
from attn_dispatch.core.tuning.timing import orders, turns
from attn_dispatch.flash import library as flash_library
from attn_dispatch_tools import cli
from attn_dispatch_tools.bench import device_time, measure, report, run, screen, table
from attn_dispatch_tools.bench.arrays import BATCH, PADDED, ROW, ROWS, Arrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.measure import Options
from attn_dispatch_tools.bench.peers import all_peers, dew_flash_attn, named, torch_sdpa
from attn_dispatch_tools.bench.peers.jax_nn import JaxNn
from attn_dispatch_tools.bench.peers.ours import PEERS as OURS
from attn_dispatch_tools.bench.peers.peer import Call, JaxPeer
from attn_dispatch_tools.bench.report import CellResults, Report

TINY = Cell("tiny", "d8 causal", 1, 16, 2, 1, 8, 8)
DOCUMENTS = Cell("packed", "tiny documents", 1, 12, 2, 1, 8, 8, lengths=(5, 1, 6), longest=8)
WINDOW = Cell("window", "tiny window", 2, 16, 2, 2, 8, 8, window=5)
QUICK = Options(rounds=1, seconds=1e-4)


class Raising(JaxPeer):
    """A package that has no such call."""

    name = "raising"

    def absent(self) -> str:
        return ""

    def call(self, cell, arrays):
        raise ValueError(f"no kernel for head dim {cell.head_dim}\nand more")


class Doubled(JaxPeer):
    """A package that computes something else."""

    name = "doubled"

    def absent(self) -> str:
        return ""

    def call(self, cell, arrays):
        return Call(lambda q, k, v: 2 * jax.nn.dot_product_attention(q, k, v, is_causal=True))


def ours() -> JaxPeer:
    return OURS[0]


# What is counted


@pytest.mark.parametrize(
    "cell, flops",
    [
        # 4 · 2 rows · 64² pairs · 3 heads · 8
        (Cell("g", "f", 2, 64, 3, 1, 8, 8, is_causal=False), 4 * 2 * 4096 * 3 * 8),
        (Cell("g", "f", 2, 64, 3, 1, 8, 8), 4 * 2 * 4096 * 3 * 8 / 2),
        # Scores are 12 wide and values 4.
        (Cell("g", "f", 1, 64, 1, 1, 12, 4), 2 * 2048 * (12 + 4)),
        # Only pairs of one document: (25 + 1 + 36) / 2
        (DOCUMENTS, 4 * 31 * 2 * 8),
        # Two rows of 11 whole windows of 5 keys, and a triangle of 5.
        (WINDOW, 4 * 2 * (11 * 5 + 12.5) * 2 * 8),
    ],
)
def test_flops(cell, flops):
    assert cell.flops("forward") == flops
    assert cell.flops("backward") == 2.5 * flops
    assert cell.flops("forward_backward") == 3.5 * flops


def test_a_cell_of_the_dense_grid_by_hand():
    cell = next(x for x in GRIDS["dense"] if x.name == "d128 causal b2 8k")
    assert cell.forward_flops == 2 * 2 * 8192 * 8192 * 16 * 128  # 0.55 TFLOP
    assert (cell.batch * cell.seq_len, cell.num_heads * cell.head_dim) == (16384, 2048)


def test_cells_of_a_grid_have_names_of_their_own_and_survive_json():
    for grid, cells in GRIDS.items():
        assert len({x.name for x in cells}) == len(cells), grid
        assert {x.grid for x in cells} == {grid}
        for cell in cells:
            assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def test_the_grids_that_were_asked_for():
    assert len(GRIDS["dense"]) == 3 * 2 * 6
    assert {len(x.lengths) for x in GRIDS["packed"]} == {16, 64}
    assert {(x.head_dim, x.head_dim_v) for x in GRIDS["mla"]} == {(192, 128)}
    assert max(x.seq_len for x in GRIDS["long"]) == 131072


# Turns


@pytest.mark.parametrize("count", [2, 3, 4, 5, 10, 11])
def test_each_program_follows_each_other_one_equally_often(count):
    square = orders(count)
    assert all(sorted(order) == list(range(count)) for order in square)
    followed = Counter(pair for order in square for pair in itertools.pairwise(order))
    assert followed.keys() == set(itertools.permutations(range(count), 2))
    assert len(set(followed.values())) == 1
    places = Counter((place, x) for order in square for place, x in enumerate(order))
    assert len(set(places.values())) == 1


def test_turns_go_by_these_orders():
    ran: list[str] = []

    def timed(name):
        return lambda calls: ran.append(name) or 1e-3 * calls

    times = turns({x: timed(x) for x in "abcd"}, rounds=4, seconds=1e-3)
    assert {x: len(y) for x, y in times.items()} == dict.fromkeys("abcd", 4)
    rounds = [tuple(ran[i : i + 4]) for i in range(8, len(ran), 4)]
    assert rounds == [tuple("abcd"[x] for x in order) for order in orders(4)]


def test_no_more_rounds_once_time_is_up_but_one():
    times = turns({"a": lambda calls: 1.0}, rounds=9, seconds=1.0, is_over=lambda: True)
    assert len(times["a"]) == 1


# Peers


def test_layouts_hold_the_same_numbers():
    arrays = Arrays(DOCUMENTS)
    rows, row, padded = (arrays.given(x) for x in (ROWS, ROW, PADDED))
    assert [x.shape for x in rows[:2]] == [(12, 2, 8), (12, 1, 8)]
    assert row[0].shape == (1, 12, 2, 8) and padded[1].shape == (3, 8, 1, 8)
    for layout, given in ((ROW, row), (PADDED, padded)):
        for x, y in zip(arrays.without_padding(given, layout), rows, strict=True):
            assert (x == y).all()
    assert padded[0][1, 0].any() and not padded[0][1, 1:].any()
    assert Arrays(WINDOW).given(BATCH)[3].shape == (2, 16, 2, 8)


@pytest.mark.parametrize("cell", [TINY, WINDOW, DOCUMENTS], ids=lambda x: x.grid)
@pytest.mark.parametrize("direction", ["forward", "backward", "forward_backward"])
def test_peers_compute_the_same_thing(cell, direction):
    anywhere = {"ours", "ours: segment ids", "ours: padded"}
    peers = [*(x for x in OURS if x.name in anywhere), JaxNn("xla")]
    found = measure.measure(cell, direction, peers, Arrays(cell), QUICK)
    wanted = {"ours", "jax.nn: xla"}
    if cell.lengths:
        wanted |= {"ours: segment ids", "ours: padded"}
    assert found.keys() == wanted
    for row in found.values():
        assert row["difference"] <= 0.03
        wall = row["wall_us"]
        assert 0 < wall["min"] <= wall["quartiles"][0] <= wall["median"] <= wall["quartiles"][1]
        flops = cell.flops(direction)
        assert row["tflops"] == pytest.approx(flops / wall["median"] / 1e6)
        assert row["memory_bytes"] > 0
        assert row["device_us"] is None and row["device_reason"] == "the profile has no GPU"
        steps = row["first_call_ms"]
        assert steps["total"] == pytest.approx(sum(steps[x] for x in steps if x != "total"))


def test_a_peer_that_raises_or_differs_is_a_reason():
    peers = [ours(), Raising(), Doubled()]
    found = measure.measure(TINY, "forward", peers, Arrays(TINY), QUICK)
    assert found["raising"] == {"reason": "ValueError: no kernel for head dim 8"}
    assert "its results differ by 1 of the largest" in found["doubled"]["reason"]
    assert "tflops" in found["ours"] and "tflops" not in found["doubled"]


def test_a_peer_that_fails_between_its_turns_is_a_reason():
    class Failing:
        def __init__(self):
            self.facts, self.left = {}, 3

        def seconds(self, calls):
            self.left -= 1
            if not self.left:
                raise MemoryError("no more")
            return 1e-3

        def results(self):
            return None

    class Late(Raising):
        name = "late"

        def program(self, cell, direction, arrays):
            return Failing()

    found = measure.measure(TINY, "forward", [ours(), Late()], Arrays(TINY), QUICK)
    assert found["late"] == {"reason": "MemoryError: no more"}
    assert found["ours"]["rounds"] == 1


def test_absent_peers_are_told_with_their_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    here, facts = run.present(all_peers())
    assert {"ours", "jax.nn: xla"} <= {x.name for x in here}
    assert facts["peers"].keys() == {x.name for x in all_peers()}
    assert facts["absent"]["jax.nn: cudnn"] == "cuDNN runs on NVIDIA GPUs, and this is cpu"
    assert facts["absent"]["ours: cudnn"].startswith("cuDNN runs on NVIDIA GPUs")
    assert facts["absent"].keys() == facts["peers"].keys() - {x.name for x in here}
    assert all(facts["absent"].values())


def test_a_package_that_cannot_be_imported_is_absent(monkeypatch, tmp_path):
    (tmp_path / "tokamax.py").write_text("raise OSError('libx.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tokamax,) = named(["tokamax"], all_peers())
    assert tokamax.absent() == "cannot be imported: OSError: libx.so: cannot open"


def test_torch_answers_from_a_process_of_its_own(tmp_path):
    """Without torch, in which everything but the numbers is there."""
    for text, reason in (
        ("#!/bin/sh\n", "its process has ended"),
        ('#!/bin/sh\necho \'{"reason": "torch sees no CUDA device"}\'\nread x\n', "torch sees no"),
    ):
        script = tmp_path / "python"
        script.write_text(text)
        script.chmod(0o755)
        peer, _ = torch_sdpa.peers(str(script))
        assert peer.absent().startswith(reason)
        peer.close()
    script.write_text(
        "#!/bin/sh\n"
        'echo \'{"version": "torch 9"}\'\n'
        'read x; echo \'{"memory_bytes": 5, "first_call_ms": {"total": 1}}\'\n'
        "read x; echo '{\"seconds\": 0.25}'\n"
        'read x; echo \'{"reason": "RuntimeError: no profiler"}\'\n'
    )
    peer, _ = torch_sdpa.peers(str(script))
    assert (peer.absent(), peer.version()) == ("", "torch 9")
    program = peer.program(TINY, "forward", Arrays(TINY))
    assert program.facts["memory_bytes"] == 5 and program.seconds(3) == 0.25
    assert program.device_seconds(3) == (None, "RuntimeError: no profiler")
    with pytest.raises(RuntimeError, match="its process has ended"):
        program.seconds(3)
    with pytest.raises(NotImplementedError, match="no packed sequences"):
        peer.program(DOCUMENTS, "forward", Arrays(DOCUMENTS))


def test_device_time_counts_what_overlaps_once():
    class Line:
        def __init__(self, name, *spans):
            self.name = name
            self.events = [type("Event", (), {"start_ns": a, "end_ns": b}) for a, b in spans]

    streams = [Line("Stream #7", (0, 10), (5, 20), (30, 40)), Line("Stream #8", (35, 50))]
    assert device_time.busy_in([*streams, Line("Steps", (0, 999))]) == (40e-9, "")
    assert device_time.busy_in([Line("Ops", (0, 3)), Line("Steps", (0, 9))]) == (9e-9, "")
    assert device_time.busy_in([]) == (None, "the profile has no kernels")
    assert device_time.busy_seconds(lambda: 1 / 0) == (
        None, "the profiler failed: division by zero"
    )  # fmt: skip


# The command


def bench(capsys, *arguments: str) -> tuple[int | str | None, str, str]:
    status = None
    try:
        cli.main(["bench", *arguments])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_run(capsys, tmp_path, monkeypatch):
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


def test_the_table_at_the_end_says_who_was_fastest(capsys):
    cells = []
    for number, (ours, theirs) in enumerate([(1.0, 2.0), (3.0, 2.0), (1.0, None)]):
        found = CellResults(replace(TINY, seq_len=8 << number))
        times = {"ours": ours, "jax.nn: xla": theirs}
        rows = {x: {"wall_us": {"median": y}} if y else {"reason": "no"} for x, y in times.items()}
        found.results["forward"] = rows
        cells.append(found)
    screen.show(Report({"peers": dict.fromkeys(("ours", "jax.nn: xla"), "1")}, {}, cells))
    lines = [x.split("  ") for x in capsys.readouterr().out.splitlines()]
    rows = [[y.strip() for y in x if y] for x in lines if len(x) > 2]
    assert rows == [["peer", "cells", "forward"], ["ours", "3", "2"], ["jax.nn: xla", "2", "1"]]


def test_results_of_an_earlier_run_are_left_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(GRIDS, "small", (TINY, replace(TINY, family="d16 causal", head_dim=16)))
    words = "--grid small --peer ours --rounds 1 --seconds 0.0001 --out".split()
    for cells in ("d8*", "d16*"):
        assert bench(capsys, *words, str(tmp_path), "--cells", cells)[0] == 0
    first, second = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert second.name == f"{first.stem}-2.json"
    assert "d8 causal" in first.read_text() and "d16 causal" in second.read_text()


def test_the_time_limit_stops_and_saves(tmp_path):
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


def test_an_interruption_leaves_what_was_measured(tmp_path):
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


def test_nothing_is_begun_after_the_time_limit():
    found = measure.measure(TINY, "forward", [ours()], Arrays(TINY), Options(deadline=0.0))
    assert found == {"ours": {"reason": "not measured: the time limit was reached"}}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--grid", "huge"], "invalid choice: 'huge'"),
        (["--rounds", "0"], "expected more than 0, got 0"),
        (["--seconds", "x"], "expected a number, got 'x'"),
        (["--direction", "sideways"], "invalid choice"),
        (["--plot"], "expected at least one argument"),
    ],
)
def test_wrong_arguments(capsys, arguments, said):
    status, _, err = bench(capsys, *arguments)
    assert status == 2 and said in err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--peer", "nobody"], "expected a peer of ours, ours: cudnn, "),
        (["--cells", "nothing*"], "is named like 'nothing*'"),
        (["--out", __file__], "--out: expected a folder"),
        (["--plot", "/nowhere.json"], "expected a JSON file, got /nowhere.json"),
        (["--plot", __file__], "expected the JSON file of `attn-dispatch bench`"),
    ],
)
def test_errors(capsys, arguments, said):
    status, _, _ = bench(capsys, *arguments)
    assert str(status).startswith("error: ") and said in str(status)


def test_a_process_that_is_not_torch(capsys, tmp_path):
    """/bin/cat writes the worker's own text, which is no JSON."""
    words = ["--grid", "small", "--cells", "*full b1 128", "--peer", "torch*", "--out", tmp_path]
    status, out, _ = bench(capsys, *map(str, words), "--torch-python", "/bin/cat")
    assert status == 1 and "absent: torch: cudnn: its process answered b" in out


def test_help(capsys):
    status, out, _ = bench(capsys, "--help")
    assert status == 0
    assert all(x in out for x in ("--grid", "--time-limit", "--torch-python", "--plot", *GRIDS))


# The table and the plots


def row(tflops: float, cell: Cell, direction: str) -> dict:
    us = cell.flops(direction) / tflops / 1e6
    return {
        "tflops": tflops, "memory_bytes": int(tflops) << 20, "device_us": 0.9 * us,
        "first_call_ms": {"total": tflops / 10, "compile": 1.0},
        "wall_us": {"median": us, "min": us, "quartiles": [0.9 * us, 1.1 * us]},
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path) -> Path:
    """A report of three peers; one of them has no packed sequences."""
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


def test_table(saved):
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


def test_plots(saved, capsys, tmp_path):
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


def test_a_later_file_adds_cells_and_replaces_others(saved, tmp_path):
    data = json.loads(saved.read_text())
    data["cells"] = [x for x in data["cells"] if x["seq_len"] == 32768] + [TINY.to_json()]
    data["cells"][0]["results"]["forward"]["ours"]["tflops"] = 700.0
    data["cells"][1] |= {"results": {}, "notes": {}}
    later = tmp_path / "two.json"
    later.write_text(json.dumps(data))
    both = report.read([saved, later])
    assert len(both.cells) == 6
    found = {x.cell.name: x.value("forward", "ours", "tflops") for x in both.cells}
    assert found["d128 causal, long b1 32k"] == 700.0 and found["d128 causal, long b1 16k"] == 600
    data["environment"]["cudnn"] = "9.28.0"
    later.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"one\.json has cudnn 9\.19\.0, two\.json has 9\.28\.0"):
        report.read([saved, later])


def test_plots_as_a_page(saved, capsys, tmp_path):
    pytest.importorskip("markdown_it")
    status, out, _ = bench(capsys, "--plot", str(saved), "--out", str(tmp_path / "p"), "--html")
    (page,) = (tmp_path / "p").glob("*.html")
    assert status is None and str(page) in out.splitlines()
    text = page.read_text()
    plots = [*(tmp_path / "p").glob("*.svg")]
    assert text.count("data:image/svg+xml;base64,") == len(plots) == 4
    assert "<h1>Attention on NVIDIA H200</h1>" in text and "<table>" in text


def test_without_matplotlib_the_extra_is_named(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "attn_dispatch_tools.bench.plots", raising=False)
    monkeypatch.delattr(attn_dispatch_tools.bench, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, _ = bench(capsys, "--plot", str(saved), "--out", str(tmp_path))
    assert "pip install matplotlib, or the extra [bench]" in str(status)


def test_the_difference_is_a_share_of_the_largest_number():
    x = jnp.asarray([[[1.0, -8.0]]])
    assert measure._difference([x, x + 0.5], [x, x]) == pytest.approx(0.5 / 8)
    assert not measure._difference([x * jnp.nan], [x]) <= measure.MOST_DIFFERENCE


@pytest.mark.parametrize("name", ["d128 causal b2 8k", "16 documents, even b1 16k"])
def test_the_kernels_of_dew_flash_attn_are_called_as_flash_calls_them(name, monkeypatch):
    """Traced alone, where its library is not: both passes, dense and packed."""
    monkeypatch.setattr(flash_library, "register", lambda generation: None)
    (cell,) = (x for grid in GRIDS.values() for x in grid if x.name == name)
    call = dew_flash_attn._kernels(cell, Arrays(cell))
    rows = (cell.seq_len,) if cell.lengths else (cell.batch, cell.seq_len)
    heads = (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads)
    given = [jax.ShapeDtypeStruct((*rows, n, cell.head_dim), jnp.bfloat16) for n in heads]

    def gradients(*qkv):
        return jax.grad(lambda *x: call.function(*x, *call.extra).sum(), (0, 1, 2))(*qkv)

    assert [x.shape for x in jax.eval_shape(gradients, *given)] == [x.shape for x in given]


def test_a_pattern_that_would_take_minutes_to_read_fits_no_peer():
    with pytest.raises(ValueError, match="expected a peer of"):
        named(["[" * 100_000], all_peers())
