"""The short form of a report keeps its counts, and every failure completely."""

import json
import math

import pytest

from attn_dispatch_tools.verify import report
from attn_dispatch_tools.verify.cases import CASES
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import Report
from tests.scripts.keep_reports import keep, kept, shorten_older

FACTS = {"device": "NVIDIA H200", "cudnn": "9.19.0"}
CALL = CASES[0].to_json() | {"name": "drawn/4_2"}
FAILED = Outcome(
    "drawn/4_2", "drawn", "failed", ("out is off",), engines={"forward": "eng1"},
    errors={"out": 3.0}, allowances={"out": 2.0}, call=CALL,
)  # fmt: skip
CRASHED = Outcome(
    CASES[1].name, "window", "crashed", ("signal 11",), errors={"out": math.inf},
    allowances={"out": 2.0},
)  # fmt: skip
FULL = Report(FACTS, "cudnn", {"seed": 4}, (
    Outcome("drawn/4_0", "drawn", errors={"out": 1.0}, allowances={"out": 3.0}, call=CALL,
            engines={"forward": "eng1"}, rewrites=("sinks",)),
    Outcome("drawn/4_1", "drawn", refused_gradients={"bias": ("wide",)}, call=CALL,
            engines={"forward": "eng2"}, rewrites=("sinks", "mask")),
    FAILED,
    Outcome("a", "window", "refused", reasons=("no ALiBi", "no sinks")),
    Outcome("b", "window", "refused", reasons=("no ALiBi",)),
    CRASHED,
), 2.0)  # fmt: skip


def test_a_short_report_keeps_counts_and_failures():
    facts = kept(FULL)
    assert facts.pop("families") == {
        "drawn": {"passed": 2, "refused": 0, "failed": 1, "crashed": 0, "worst": 1.5},
        "window": {"passed": 0, "refused": 2, "failed": 0, "crashed": 1, "worst": "inf"},
    }
    assert facts == {
        "environment": FACTS,
        "implementation": "cudnn",
        "options": {"seed": 4},
        "counts": {"passed": 2, "refused": 2, "failed": 1, "crashed": 1},
        "seconds": 2.0,
        "refused": {"no ALiBi": 2, "no sinks": 1},
        "gradients_left_to_xla": {"bias: wide": 1},
        "rewrites": {"sinks": 2, "mask": 1},
        "kernels": {"forward: eng1": 2, "forward: eng2": 1},
        "outcomes": [FAILED.to_json(), CRASHED.to_json()],
    }


def test_a_folder_is_shortened_and_its_failures_can_be_repeated(tmp_path):
    full, results = tmp_path / "full", tmp_path / "results"
    results.mkdir()
    path, _ = FULL.write(full)
    (full / "gpu_suite.json").write_text("{}\n")
    keep(full, results)
    assert {x.name for x in results.iterdir()} == {path.name, "gpu_suite.json"}
    short = results / path.name
    assert json.loads(short.read_text()) == json.loads(json.dumps(kept(FULL)))
    assert report.bad_cases(short) == report.bad_cases(path)
    assert [x.name for x in report.bad_cases(short)] == ["drawn/4_2", CASES[1].name]

    text = short.read_text()
    keep(results, results)
    assert short.read_text() == text, "a report that is kept again stays as it is"


def test_the_newest_report_of_a_kind_keeps_its_reasons(tmp_path):
    def write(name: str, date: str, *, implementation: str = "cudnn", **options: object) -> None:
        facts = kept(FULL) | {"environment": FACTS | {"date": date}, "options": options}
        text = json.dumps(facts | {"implementation": implementation})
        (tmp_path / f"verify-{name}.json").write_text(text)

    write("old", "2026-11-22")
    write("new", "2026-11-23")
    write("serving", "2026-11-21", serving=True)
    write("flash", "2026-11-21", implementation="flash")
    shorten_older(tmp_path)
    found = {x.stem: json.loads(x.read_text()) for x in tmp_path.glob("verify-*.json")}
    reasons = {"refused", "gradients_left_to_xla", "rewrites", "kernels"}
    old, new = found.pop("verify-old"), found["verify-new"]
    assert all(reasons <= x.keys() for x in found.values())
    same = {name: x for name, x in new.items() if name not in {*reasons, "environment"}}
    assert old == same | {"environment": FACTS | {"date": "2026-11-22"}}
    assert len(report.bad_cases(tmp_path / "verify-old.json")) == 2


def test_a_short_report_cannot_be_read_as_a_full_one(tmp_path):
    path, _ = FULL.write(tmp_path)
    assert report.read(path).counts() == FULL.counts()
    keep(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"with every outcome, got .*\.json with 2 of 6$"):
        report.read(path)
