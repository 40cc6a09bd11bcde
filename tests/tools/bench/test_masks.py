"""The benchmark's masks: shares, calls, times relative to dense attention, tables and plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from attn_dispatch_tools.bench import mask_table, measure, report, screen
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import DENSE_CAUSAL, Cell
from attn_dispatch_tools.bench.grids import GRIDS, MASK_LENGTHS, masks_of
from attn_dispatch_tools.bench.mask_shares import TILE, seen, shares
from attn_dispatch_tools.bench.masks import Mask
from attn_dispatch_tools.bench.peers import all_peers, torch_worker
from attn_dispatch_tools.bench.peers.jax_nn import JaxNn
from attn_dispatch_tools.bench.peers.ours import PEERS as OURS
from attn_dispatch_tools.bench.report import CellResults, Report
from tests.support.bench_cells import QUICK, bench, row

_SMALL = {
    "causal": Mask(),
    "window": Mask(window=100),
    "window and sinks": Mask(window=100, sinks=5),
    "prefix": Mask(prefix=130),
    "chunks": Mask(chunk=160),
    "documents": Mask(documents=4),
    "uneven documents": Mask(documents=8, is_uneven=True),
    "images": Mask(image=60),
    "images by ends": Mask(image=60, has_ends=True),
}
_TOKENS = 300
ROWS = ("ours", "ours: cudnn", DENSE_CAUSAL)


def cell(mask: Mask, tokens: int = _TOKENS) -> Cell:
    return Cell("masks", "a mask", 1, tokens, 2, 1, 8, 8, mask=mask)


def pairs_of(mask: Mask, tokens: int) -> np.ndarray:
    """The mask as an array, from its function."""
    t = np.arange(tokens)
    return np.asarray(mask.function()(t[:, None], t[None], np.asarray(mask.groups(tokens))))


def test_the_small_masks_have_the_fields_of_the_grid():
    def fields(mask: Mask) -> set[str]:
        return {name for name, x in vars(mask).items() if x}

    wanted = {frozenset(fields(x)) for x in masks_of(8192).values()}
    assert wanted == {frozenset(fields(x)) for x in _SMALL.values()}


@pytest.mark.parametrize("name", _SMALL)
def test_seen_pairs_and_tiles_are_those_of_the_function(name):
    mask = _SMALL[name]
    dense = pairs_of(mask, _TOKENS)
    padded = np.pad(dense, (0, -_TOKENS % TILE)).reshape(-(-_TOKENS // TILE), TILE, -1, TILE)
    found = seen(mask, _TOKENS)
    assert (found.pairs, found.tiles) == (dense.sum(), padded.any((1, 3)).sum())
    assert cell(mask).pairs == dense.sum()


def test_the_grid_has_shares_from_few_tiles_to_all():
    for tokens in MASK_LENGTHS:
        found = {name: shares(mask, tokens).tiles for name, mask in masks_of(tokens).items()}
        assert found["causal"] == 1
        assert min(found.values()) < 0.09
        for low, high in ((0.1, 0.2), (0.2, 0.4), (0.4, 0.9), (1, 1.1)):
            assert any(low <= x <= high for x in found.values()), (tokens, low, found)
    assert shares(Mask(documents=8), 8192).pairs == pytest.approx(1 / 8, rel=0.01)
    assert masks_of(8192)["images"].groups(8192).count(0) == 4096


def test_documents_fill_the_row():
    for mask in (Mask(documents=8), Mask(documents=32, is_uneven=True)):
        lengths = mask.document_lengths(8192)
        assert sum(lengths) == 8192 and len(lengths) == mask.documents and min(lengths) > 0
    assert len(set(Mask(documents=8).document_lengths(8192))) == 1
    assert max(Mask(documents=32, is_uneven=True).document_lengths(8192)) > 400


@pytest.mark.parametrize("name", _SMALL)
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_peers_compute_the_same_mask(name, direction):
    """Ours, as users write it, and jax.nn with all pairs as an array."""
    one = cell(_SMALL[name])
    peers = [OURS[0], JaxNn("xla")]
    found = measure.measure(one, direction, peers, CellArrays(one), QUICK)
    assert found.keys() == {"ours", "jax.nn: xla"}
    assert all(0 <= x["difference"] <= 0.03 for x in found.values()), found
    # Another mask is no small difference.
    wrong = replace(one, mask=Mask(window=50))
    arrays = CellArrays(one)
    arrays.dense_mask = CellArrays(wrong).dense_mask
    if one.mask not in (Mask(), Mask(window=100)):
        found = measure.measure(one, direction, peers, arrays, QUICK)
        assert "its results differ" in found["jax.nn: xla"]["reason"]


def test_the_peers_of_masks():
    concerned = [x.name for x in all_peers() if x.concerns(cell(Mask(prefix=9)))]
    assert concerned == [
        "ours", "ours: cudnn", "ours: flash", "ours: fa4", "ours: xla", DENSE_CAUSAL,
        "jax.nn: cudnn", "jax.nn: xla", "torch: flex",
    ]  # fmt: skip
    others = [x.name for x in all_peers() if x.concerns(replace(cell(Mask()), mask=None))]
    assert not {"ours: xla", DENSE_CAUSAL, "torch: flex"} & {*others}


def test_xla_is_not_measured_with_more_pairs_than_fit():
    large = Cell("masks", "prefix", 1, 32768, 32, 8, 128, 128, mask=Mask(prefix=8192))
    for peer in all_peers():
        if peer.name == "ours: xla":
            with pytest.raises(NotImplementedError, match="XLA computes all pairs"):
                peer.program(large, "forward", CellArrays(large))


class _Fixed:
    """A peer whose calls take a fixed time."""

    def __init__(self, name: str, seconds: float):
        self.name, self.time, self.profiles = name, seconds, 0

    def concerns(self, cell: Cell) -> bool:
        return True

    def program(self, cell, direction, arrays):
        peer = self

        class Program:
            def __init__(self):
                self.facts = {}

            def seconds(self, calls: int) -> float:
                return peer.time

            def device_seconds(self, calls: int):
                peer.profiles += 1
                return peer.time / peer.profiles, ""

            def results(self):
                return None

        return Program()

    def release(self) -> None:
        pass


def test_times_are_compared_with_dense_attention_on_the_seen_tiles():
    one = cell(Mask(documents=2), 1024)
    share = shares(Mask(documents=2), 1024).tiles
    peers = [_Fixed("ours", 0.003), _Fixed(DENSE_CAUSAL, 0.004)]
    found = measure.measure(one, "forward", peers, CellArrays(one), QUICK)  # type: ignore[arg-type]
    assert share == pytest.approx(20 / 36)
    assert found["ours"]["over_dense"] == pytest.approx(3 / (4 * share))
    assert "over_dense" not in found[DENSE_CAUSAL] and "tflops" not in found[DENSE_CAUSAL]
    assert [x.profiles for x in peers] == [2, 1]  # the first profile is discarded
    assert [found[x.name]["device_us"] for x in peers] == pytest.approx([1500, 4000])
    alone = measure.measure(one, "forward", peers[:1], CellArrays(one), QUICK)  # type: ignore[arg-type]
    assert "over_dense" not in alone["ours"]


@pytest.fixture
def masks_report() -> Report:
    facts = {
        "device": "NVIDIA H200", "cudnn": "9.19.0", "jax": "0.11.2", "driver": "580", "commit": "c",
        "date": "2026-11-23", "peers": dict.fromkeys(ROWS, "1"), "absent": {},
    }  # fmt: skip
    cells = []
    for one in GRIDS["masks"]:
        results = {}
        for direction in ("forward", "forward_backward"):
            results[direction] = {x: row(600 + i, one, direction) for i, x in enumerate(ROWS)}
            for name in ROWS[:2]:
                results[direction][name]["over_dense"] = 1.13
        cells.append(CellResults(one, results))
    return Report(facts, {}, cells)


def test_the_table_has_shares_times_and_ratios(masks_report, tmp_path):
    path = tmp_path / "masks.json"
    masks_report.write(path)
    data = json.loads(path.read_text())["cells"][0]
    assert data["shares"] == {"pairs": 1.0, "tiles": 1.0} and data["mask"]["prefix"] == 0
    again = report.read([path])
    assert [x.cell for x in again.cells] == [x.cell for x in masks_report.cells]
    lines = mask_table.lines(again)
    assert "### 8,192 tokens, forward, µs" in lines
    assert f"|  | pairs | tiles | {' | '.join(ROWS)} |" in lines
    us = masks_report.cells[0].results["forward"]["ours"]["wall_us"]["median"]
    (causal, *_) = (
        x for x in lines[lines.index("### 32,768 tokens, forward, µs") :] if "| caus" in x
    )
    assert causal.startswith("| causal | 100.0 % | 100.0 % | ")
    assert f"| {us:.0f} (1.13) | **" in causal
    tables = [x for x in lines if x.startswith("| ") and "%" in x]
    shown = [float(x.split("|")[3].strip(" %")) for x in tables]
    of_lengths = shown[:3], shown[3:6], shown[6:16], shown[16:26]
    assert all(list(x) == sorted(x) for x in of_lengths) and len(tables) == 2 * (3 + 10 + 10)


def test_a_later_file_adds_peers_to_a_mask(masks_report, tmp_path):
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    masks_report.write(paths[0])
    (first, *_) = masks_report.cells
    results = {"forward": {"ours": first.results["forward"]["ours"] | {"over_dense": 2.0}}}
    results["forward"]["torch: flex"] = {"reason": "none"}
    Report(masks_report.environment, {}, [CellResults(first.cell, results)]).write(paths[1])
    both = report.read(paths).cells[0]
    assert [*both.results["forward"]] == [*ROWS, "torch: flex"]
    assert both.value("forward", "ours", "over_dense") == 2.0
    assert both.value("forward_backward", "ours", "over_dense") == 1.13


def test_the_line_of_a_mask_has_times_and_ratios(masks_report):
    text = screen.summary_line(masks_report.cells[0])
    assert text.startswith("masks: causal b1 32k: ours ") and text.endswith(" µs")
    assert "(1.13)/" in text


def test_the_plot_has_a_panel_for_each_length_and_direction(masks_report, capsys, tmp_path):
    path = tmp_path / "masks.json"
    masks_report.write(path)
    assert bench(capsys, "--plot", str(path), "--out", str(tmp_path / "p"))[0] is None
    assert {x.name for x in (tmp_path / "p").iterdir()} == {
        "masks.svg", "bench-masks-NVIDIA_H200-9_19_0.md"
    }  # fmt: skip
    root = ET.fromstring((tmp_path / "p" / "masks.svg").read_text())
    texts = {"".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {*ROWS, "forward, 8,192 tokens", "forward and backward, 32,768 tokens"} <= texts


def test_torch_has_the_masks_of_this_package():
    """Its process loads them by their path, without importing the package."""
    facts = json.loads(json.dumps(GRIDS["masks"][1].to_json()))["mask"]
    mask = torch_worker._masks().Mask(**facts)
    assert type(mask) is not Mask and vars(mask) == vars(GRIDS["masks"][1].mask)
    assert mask.function()(9000, 63, None) and not mask.function()(9000, 64, None)
