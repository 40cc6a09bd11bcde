"""The `attn-dispatch verify` command, and failures of its workers."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import jax
import pytest

import attn_dispatch
import attn_dispatch_tools
from attn_dispatch import aiter
from attn_dispatch.core.rewrites import ONE_BY_ONE, REWRITES
from attn_dispatch.core.rewrites.catalogue import OF_OFFSETS
from attn_dispatch.core.rewrites.empty import NO_SCORES
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.one_diagonal import ONE_DIAGONAL
from attn_dispatch_tools import cli
from attn_dispatch_tools.verify import draws, pool
from attn_dispatch_tools.verify import report as reports
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.each_rewrite import each_rewrite
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import Report, bad_cases
from attn_dispatch_tools.verify.serving_draws import serving_examples

SIZE = "f16_d64_33x17"
CASES = f"plain/*_{SIZE}"
NAMES = [f"plain/{x}_{SIZE}" for x in ("full", "causal", "bottom_right")]


@pytest.fixture
def verify(tmp_path, capsys):
    """A function that runs the command and returns its status, output and both reports, if any."""

    def run(*arguments: str) -> tuple[int | str | None, str, dict, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", "--out", str(tmp_path), *arguments])
        reports = sorted(tmp_path.glob("verify-*.[jm]*"))
        data = json.loads(reports[0].read_text()) if reports else {}
        return (
            ended.value.code,
            capsys.readouterr().out,
            data,
            reports[1].read_text() if reports else "",
        )

    return run


def odd_worker(behaviour: str) -> list[str]:
    """The command line of odd_worker.py that misbehaves in this way."""
    return [sys.executable, str(Path(__file__).with_name("odd_worker.py")), behaviour]


def test_a_run_writes_its_counts_and_outcomes(verify):
    status, printed, report, text = verify("--cases", f"{CASES},nothing/*", "--jobs", "2")
    assert status == 0
    assert "3 cases of xla, 2 at a time" in printed
    assert "3 of 3: 3 passed" in printed
    assert report["counts"] == {"passed": 3, "refused": 0, "failed": 0, "crashed": 0}
    facts = report["environment"]
    assert facts["jax"] == jax.__version__
    assert facts["attn_dispatch"] == attn_dispatch.__version__
    assert {"commit", "date", "device", "driver", "cudnn", "aiter", "platform"} <= facts.keys()
    assert [x["case"] for x in report["outcomes"]] == NAMES
    for outcome in report["outcomes"]:
        assert outcome["engines"] == {"forward": "dense", "backward": "dense"}
        assert outcome["backward"] == "xla"
        assert outcome["errors"].keys() == {"out", "lse", "query", "key", "value"}
        assert all(0 < x < outcome["allowances"][name] for name, x in outcome["errors"].items())
        assert outcome["seconds"] > 0
    assert f"| jax | {jax.__version__} |" in text
    assert "| plain | 3 | 0 | 0 | 0 | 0." in text


def test_html_writes_the_report_as_a_page(verify, tmp_path):
    pytest.importorskip("markdown_it")
    pytest.importorskip("matplotlib")
    status, printed, *_ = verify("--cases", NAMES[0], "--html")
    (page,) = tmp_path.glob("*.html")
    assert status == 0 and str(page) in printed
    text = page.read_text()
    assert "<title>attn-dispatch verify: xla on " in text
    assert text.count("data:image/svg+xml;base64,") == 2
    assert f"<td>jax</td>\n<td>{jax.__version__}</td>" in text


def test_the_report_has_the_settings(verify, monkeypatch):
    for name, value in {"SCRATCH_LIMIT": "2GB", "AITER_ASM": "0", "REWRITES": "0"}.items():
        monkeypatch.setenv(f"ATTN_DISPATCH_{name}", value)
    _, _, report, text = verify("--cases", NAMES[0])
    expected = {"scratch_limit": 2 * 10**9, "aiter_asm": False, "rewrites": False}
    assert expected.items() <= report["options"].items()
    assert "| scratch_limit | 2000000000 |" in text


def test_random_draws_cases_after_named_ones(verify):
    status, printed, report, _ = verify("--cases", NAMES[0], "--random", "2", "--seed", "4")
    assert status == 0
    assert "--random 2 --seed 4 draws them again" in printed
    assert [x["case"] for x in report["outcomes"]] == [NAMES[0], "drawn/4_0", "drawn/4_1"]
    assert report["options"]["seed"] == 4


def test_serving_draws_calls_with_a_cache(verify):
    status, printed, report, _ = verify("--cases", "", "--random", "3", "--serving", "--seed", "4")
    assert status == 0 and "--random 3 --serving --seed 4 draws them again" in printed
    assert [x["case"] for x in report["outcomes"]] == ["served/4_0", "served/4_1", "served/4_2"]
    assert report["options"]["serving"] and "--random N" in str(verify("--serving")[0])
    cases = serving_examples(400, 4)
    assert all(Case.from_json(case.to_json()) == case for case in cases)
    assert {1, 24, 1024} <= {case.page for case in cases} and any(x.ragged for x in cases)
    assert {0, 1} <= {length for case in cases for length in case.kv_lengths or ()}


def test_masks_draws_calls_with_masks(verify):
    status, printed, report, _ = verify("--cases", "", "--random", "1", "--masks", "--seed", "4")
    assert status == 0 and "--random 1 --masks --seed 4 draws them again" in printed
    assert [x["case"] for x in report["outcomes"]] == ["masked_draw/4_0"]
    assert report["options"]["masks"] and "--random N" in str(verify("--masks")[0])
    both = verify("--cases", "", "--random", "1", "--masks", "--serving")
    assert "expected no --serving beside it" in str(both[0])


def test_wide_draws_calls_with_wide_heads(verify):
    status, printed, report, _ = verify("--cases", "", "--random", "1", "--wide", "--seed", "3")
    assert status == 0 and "--random 1 --wide --seed 3 draws them again" in printed
    assert [x["case"] for x in report["outcomes"]] == ["wide_draw/3_0"]
    assert report["options"]["wide"] and "--random N" in str(verify("--wide")[0])
    both = verify("--cases", "", "--random", "1", "--masks", "--wide")
    assert "--wide: expected no --masks beside it" in str(both[0])


def test_each_rewrite_draws_calls_for_every_rewrite(verify):
    drawn = each_rewrite(draws.examples(150, 5))
    used = Counter(case.rewrite for case in drawn)
    # Draws have no empty axis, no page of an odd size such as 24 keys, no call on whole pages
    # alone, no call long enough to gain from queries and keys on one diagonal, and no number as
    # causal_alignment, which tests/core/rewrites/test_offsets.py draws.
    left_out = (NO_SCORES, SMALLER_PAGES, HEADS_AS_QUERIES, ONE_DIAGONAL, *OF_OFFSETS)
    names = {x.name for x in (*REWRITES, *ONE_BY_ONE)} - {x.name for x in left_out}
    assert used.keys() - {""} == names
    assert all(Case.from_json(case.to_json()) == case for case in drawn)
    assert "--random N" in str(verify("--each-rewrite")[0])
    status, _, report, _ = verify(
        "--cases", NAMES[0], "--random", "2", "--seed", "5", "--each-rewrite"
    )
    assert status == 0
    assert [x["call"].get("rewrite") for x in report["outcomes"][1:]] == [
        case.rewrite for case in drawn[:2]
    ]


def test_an_interrupted_run_reports_the_cases_that_were_done(verify, monkeypatch):
    def interrupted(cases, command, jobs):
        yield Outcome(cases[1].name, cases[1].family)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run", interrupted)
    status, printed, report, text = verify("--cases", CASES)
    assert status == 130
    assert [x["case"] for x in report["outcomes"]] == [NAMES[1]]
    assert report["options"]["interrupted"] and "Interrupted: others were not run." in text
    assert "interrupted: 1 of 3 cases were done" in printed


def test_repeat_runs_failed_cases_again(verify, monkeypatch, tmp_path):
    """Drawn calls are stored in the report; named cases are found in the table."""
    monkeypatch.setattr(pool, "command", lambda implementation: odd_worker("wrong"))
    arguments = ("--cases", NAMES[1], "--random", "4", "--seed", "3", "--jobs", "1")
    _, _, report, _ = verify(*arguments)
    bad = [x for x in report["outcomes"] if x["status"] == "failed"]
    assert len(bad) >= 2 and "call" not in bad[0] and bad[1]["case"].startswith("drawn/3_")
    (written,) = tmp_path.glob("*.json")
    cases = bad_cases(written)
    assert cases[0] == BY_NAME[NAMES[1]]
    assert cases[1:] == [Case.from_json(x["call"]) for x in bad[1:]]
    assert {*cases[1:]} <= {*draws.examples(4, seed=3)}
    for path in tmp_path.glob("verify-*"):
        path.rename(path.with_name("earlier" + path.suffix))
    status, _, again, _ = verify("--repeat", str(tmp_path / "earlier.json"), "--jobs", "1")
    assert (status, [x["case"] for x in again["outcomes"]]) == (1, [x.name for x in cases])
    assert again["options"] == {"repeat": "earlier.json", "jobs": 1}


def test_repeat_of_a_file_that_is_no_report_is_an_error(verify, tmp_path):
    (tmp_path / "other.json").write_text("[1]")
    for name in ("none.json", "other.json"):
        status, *_ = verify("--repeat", str(tmp_path / name))
        assert "expected the JSON file of a report" in str(status) and name in str(status)


def test_an_implementation_that_cannot_run_is_an_error(verify):
    status, printed, report, _ = verify("--implementation", "cudnn")
    expected = "error: cudnn cannot run here: cuDNN runs on NVIDIA GPUs, and this is CPU (cpu)"
    assert (status, printed, report) == (expected, "", {})


def test_a_run_of_refused_cases_alone_has_status_1(verify, monkeypatch):
    monkeypatch.setattr(aiter, "unusable_reason", lambda device: "")
    status, printed, report, text = verify("--cases", CASES, "--implementation", "aiter")
    assert status == 1
    assert report["counts"]["refused"] == 3
    reason = "AITER runs on AMD GPUs, and this is CPU (cpu)"
    assert f"3 cases: {reason}" in printed
    assert f"- 3 cases: {reason}" in text


def test_a_wrong_implementation_fails_its_cases(verify, monkeypatch):
    monkeypatch.setattr(pool, "command", lambda implementation: odd_worker("wrong"))
    status, printed, report, text = verify("--cases", CASES, "--jobs", "1")
    assert status == 1
    causal = next(x for x in report["outcomes"] if x["case"] == NAMES[1])
    assert causal["status"] == "failed"
    assert causal["failures"][0].startswith("out: error 0.0")
    assert f"failed: {NAMES[1]}: out: error" in printed
    assert f"### {NAMES[1]}: failed" in text


def outcomes(behaviour: str, **options: float) -> dict[str, Outcome]:
    """The outcomes of NAMES with one odd worker, which affects only the causal case."""
    found = {
        x.case: x
        for x in pool.run([BY_NAME[x] for x in NAMES], odd_worker(behaviour), 1, **options)
    }
    assert found.keys() == set(NAMES)
    assert [found[NAMES[0]].status, found[NAMES[2]].status] == ["passed", "passed"]
    return found


def test_a_crash_is_reported_and_the_others_go_on():
    crashed = outcomes("crash")[NAMES[1]]
    assert crashed.status == "crashed"
    assert crashed.failures[0].startswith("the worker died of SIGSEGV\n")
    assert "as the test wants it" in crashed.failures[0]


def test_a_worker_that_exits_is_reported():
    ended = outcomes("exit")[NAMES[1]]
    assert (ended.status, ended.failures) == ("crashed", ("the worker ended with exit status 3",))


def test_an_exception_fails_the_case():
    failed = outcomes("raise")[NAMES[1]]
    assert failed.status == "failed"
    assert failed.failures[0].startswith("raised RuntimeError: Traceback")
    assert failed.failures[0].endswith("RuntimeError: as the test wants it")


def test_a_worker_whose_device_is_broken_is_replaced():
    assert outcomes("device")[NAMES[1]].status == "failed"


def test_a_worker_that_hangs_is_ended():
    (stuck,) = pool.run([BY_NAME[NAMES[1]]], odd_worker("hang"), 1, seconds_per_case=1)
    assert (stuck.status, stuck.failures[0]) == ("crashed", "no answer within 1 s")


def test_output_of_libraries_is_not_read_as_an_answer():
    assert outcomes("print")[NAMES[1]].status == "passed"


def test_outcomes_survive_json():
    outcome = Outcome(
        "a/b", "a", "failed", ("wrong",), backward="xla", refused_gradients={"bias": ("why",)},
        gradient_rules={"bias": ("rule",)}, rules=("dtype",), reasons=("no",),
        engines={"forward": "dense"}, errors={"out": float("inf"), "lse": 0.5},
        allowances={"out": 1.0, "lse": 2.0}, seconds=1.5,
    )  # fmt: skip
    text = json.dumps(outcome.to_json(), allow_nan=False)
    assert Outcome.from_json(json.loads(text)) == outcome
    assert outcome.used == float("inf")


def test_refused_cases_are_counted_by_rule():
    """One rule may have many sentences, and two rules one; old results have no rules."""
    refused = [
        Outcome("a", "f", "refused", reasons=(sentence,), rules=rules)
        for sentence, rules in (("up to 4", ("size",)), ("up to 9", ("size",)), ("no", ("bias",)),
                                ("no", ("mask",)), ("no", ()))
    ]  # fmt: skip
    assert reports.reasons_of(refused) == [("up to 4", 2), ("no", 1), ("no", 1), ("no", 1)]
    gradients = [
        Outcome("a", "f", refused_gradients={"bias": ("no",)}, gradient_rules={"bias": (rule,)})
        for rule in ("cap", "cap", "slopes")
    ]
    assert reports.gradient_reasons_of(gradients) == [("bias: no", 2), ("bias: no", 1)]


def test_a_pattern_without_cases_is_an_error(verify):
    assert verify("--cases", "nothing/*")[0] == "error: no case is named like 'nothing/*'"


def test_list_prints_cases_and_runs_nothing(capsys, tmp_path):
    cli.main(["verify", "--list", "--cases", "window/*", "--out", str(tmp_path / "none")])
    names = capsys.readouterr().out.split()
    assert names and set(names) == {x for x in BY_NAME if x.startswith("window/")}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("flag", ["", "--serving", "--each-rewrite"])
def test_list_includes_drawn_cases(capsys, flag: str):
    words = f"verify --list --cases plain/* --random 3 --seed 5 {flag}".split()
    cli.main(words)
    listed = capsys.readouterr()
    names = listed.out.split()
    family = "served" if flag == "--serving" else "drawn"
    assert names[-3:] == [f"{family}/5_{i}" for i in range(3)]
    assert len(names) > 3 and all(x.startswith("plain/") for x in names[:-3])
    assert "--seed 5 draws them again" in listed.err


def test_a_seed_without_random_is_an_error(verify):
    assert "--seed: expected --random N as well" in str(verify("--seed", "0")[0])


@pytest.mark.parametrize("arguments", [("--jobs", "0"), ("--random", "-1"), ("--jobs", "many")])
def test_wrong_numbers_are_refused(verify, arguments):
    assert verify(*arguments)[0] == 2


def _numbers(*pairs: tuple[str, float], **rest) -> Outcome:
    errors = dict(pairs)
    return Outcome(**{"case": "a", "family": "f", "errors": errors,
                      "allowances": dict.fromkeys(errors, 2.0)} | rest)  # fmt: skip


def test_plots_show_shares_by_family_and_result():
    pytest.importorskip("matplotlib")
    from attn_dispatch_tools.verify import plots

    outcomes = [
        _numbers(("out", 1.0), ("query", 0.5)),
        _numbers(("out", 0.2), family="g"),
        _numbers(("out", 3.0), ("lse", 0.0), status="failed", failures=("out is wrong",)),
        _numbers(family="g", status="failed", failures=("an exception",)),
        _numbers(("out", math.inf), family="h", status="failed", failures=("NaN",)),
        _numbers(family="h", status="crashed", failures=("signal 11",)),
        _numbers(family="h", status="refused", reasons=("no",)),
    ]
    rows = {x.name: (sorted(x.shares), x.label) for x in plots.by_family(outcomes)}
    assert rows == {
        "f": ([0.5, 1.5], "2 cases, 1 wrong"),
        "g": ([0.1, math.inf], "2 cases, 1 wrong"),
        "h": ([math.inf, math.inf], "2 cases, 2 wrong, 1 refused"),
    }
    rows = {x.name: (list(x.shares), x.label) for x in plots.by_result(outcomes)}
    assert list(rows) == ["output", "log-sum-exp", "gradient of query"]
    assert rows["output"] == ([0.5, 0.1, 1.5, math.inf], "4 arrays, 2 wrong")
    assert rows["gradient of query"] == ([0.25], "1 array, worst 0.25")


def test_plot_writes_a_page_of_an_earlier_report(capsys, tmp_path):
    pytest.importorskip("markdown_it")
    pytest.importorskip("matplotlib")
    outcomes = (
        _numbers(("out", 1.0), family="window"),
        _numbers(("out", 9.0), family="mask", status="failed", failures=("out is off by 9",)),
    )
    facts = {"device": "NVIDIA H200", "cudnn": "9.19.0"}
    written, _ = Report(facts, "cudnn", {"seed": 4}, outcomes, 2.0).write(tmp_path)
    assert reports.read(written) == Report(facts, "cudnn", {"seed": 4}, outcomes, 2.0)
    cli.main(["verify", "--plot", str(written), "--out", str(tmp_path / "pages")])
    (page,) = (tmp_path / "pages").iterdir()
    assert capsys.readouterr().out == f"{page}\n" and page.stem == written.stem
    text = page.read_text()
    assert "<h1>attn-dispatch verify: cudnn on NVIDIA H200</h1>" in text
    assert "mask" in text and "out is off by 9" in text
    pictures = [base64.b64decode(x) for x in re.findall(r"svg\+xml;base64,([^\"]+)", text)]
    shown = [" ".join(ET.fromstring(x).itertext()) for x in pictures]
    assert "by family" in shown[0] and "1 case, worst 0.50" in shown[0]
    assert "by result" in shown[1] and "2 arrays, 1 wrong" in shown[1]


def test_a_report_of_refused_cases_alone_has_no_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from attn_dispatch_tools.verify import plots

    refused = Outcome("a", "f", status="refused", reasons=("no",))
    assert plots.draw(Report({}, "flash", {}, (refused,), 1.0), tmp_path) == []


def test_plot_of_a_file_that_is_no_report_is_an_error(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("[]")
    for path in (other, tmp_path / "none.json"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", "--plot", str(path)])
        message = str(ended.value.code)
        assert "expected the JSON file of a report of `attn-dispatch verify`" in message
        assert str(path) in message


@pytest.fixture
def no_matplotlib(monkeypatch):
    pytest.importorskip("markdown_it")
    monkeypatch.delitem(sys.modules, "attn_dispatch_tools.verify.plots", raising=False)
    monkeypatch.delattr(attn_dispatch_tools.verify, "plots", raising=False)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "matplotlib", None)


_NO_PLOTS = "the page will have no plots: plots are drawn with matplotlib: pip install matplotlib"


def test_html_without_matplotlib_has_no_plots(no_matplotlib, capsys, tmp_path):
    """The extras [rocm] and [verify] do not bring it."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--cases", NAMES[0], "--html", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().err.startswith(_NO_PLOTS)
    (page,) = tmp_path.glob("*.html")
    text = page.read_text()
    assert "<h1>attn-dispatch verify: " in text and "svg" not in text


def test_plot_without_matplotlib_writes_the_page(no_matplotlib, capsys, tmp_path):
    outcomes = (_numbers(("out", 1.0), family="window"),)
    written, _ = Report({"device": "MI300X", "cudnn": "none"}, "aiter", {}, outcomes, 2.0).write(
        tmp_path
    )
    cli.main(["verify", "--plot", str(written), "--out", str(tmp_path / "pages")])
    (page,) = (tmp_path / "pages").iterdir()
    found = capsys.readouterr()
    assert found.out == f"{page}\n" and found.err.startswith(_NO_PLOTS)
    assert "window" in page.read_text()
