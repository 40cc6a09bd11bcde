"""The table of preferences: what its rows mean, and its replay against measured times."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import attn_dispatch
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import preferences, select
from attn_dispatch.core.preferences import Row
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import CPU, parse
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support import choices_replay
from tests.support.backend import needs_cudnn
from tests.support.fake_implementation import Fake
from tests.support.repository import ROOT

CUDA = parse("h200")
RESULTS = sorted((ROOT / "benchmarks/results").glob("choices*.json"))

KERNEL, EXTRA = Fake("kernel"), Fake("extra", IS_EXTRA=True)
REFUSES = Fake("extra", ("only by a rewrite",), IS_EXTRA=True)
XLA = Fake("xla", PLATFORM=None)


def _everywhere(implementation: Any, device: Device) -> bool:
    return implementation.PLATFORM in (None, device.platform)


def _spec(**facts: Any) -> AttentionSpec:
    case = Case("preferred", **({"dtype": "bfloat16"} | facts))
    return spec_of(case.forward_options(), case.avals())


def _row(first: str, *, by_rewrites: bool | None = None, **calls: Any) -> Row:
    row: Row = {"first": first, "calls": {"arch": "sm90", **calls}, "measured": "in this test"}
    return row if by_rewrites is None else {**row, "by_rewrites": by_rewrites}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    def use(*rows: Row) -> None:
        made = preferences.by_arch_and_direction(rows)
        monkeypatch.setattr(preferences, "_table", lambda: made)

    return use


def _names(spec: AttentionSpec, *known: Fake, device: Device = CUDA) -> list[str]:
    return [x.NAME for x in preferences.in_order(known, spec, device, _everywhere)]


@pytest.mark.parametrize(
    ("h", "v", "t", "forward", "back"),
    [
        (192, 128, 8192, ["fa4", "cudnn", "flash"], ["fa4", "cudnn", "flash"]),
        (192, 128, 2048, ["fa4", "cudnn", "flash"], ["cudnn", "flash", "fa4"]),
        (192, 128, 1024, ["cudnn", "flash", "fa4"], ["cudnn", "flash", "fa4"]),
        (192, 136, 8192, ["flash", "cudnn", "fa4"], ["cudnn", "flash", "fa4"]),
        (128, 128, 8192, ["flash", "cudnn", "fa4"], ["flash", "cudnn", "fa4"]),
        (512, 512, 8192, ["fa4", "cudnn", "flash"], ["flash", "cudnn", "fa4"]),
        (320, 320, 2048, ["fa4", "cudnn", "flash"], ["flash", "cudnn", "fa4"]),
        (320, 320, 512, ["fa4", "cudnn", "flash"], ["flash", "cudnn", "fa4"]),
    ],
)
def test_implementations_are_ordered_by_measured_speed(h, v, t, forward, back):
    found = [Fake("cudnn"), Fake("flash", IS_EXTRA=True), Fake("fa4", IS_EXTRA=True)]
    case = Case("call", b=2, t=t, s=t, n=8, k=8, h=h, v=v, dtype="bfloat16")
    call = spec_of(case.forward_options(), case.avals())
    options = case.backward_options()
    for x, names in ((call, forward), (call.backward(options), back)):
        assert [y.NAME for y in preferences.in_order(found, x, CUDA, _everywhere)] == names


@pytest.mark.parametrize(("t", "first"), [(2048, "fa4"), (1024, "cudnn")])
def test_calls_with_a_mask_mod_go_to_the_kernels_that_skip_its_tiles(t: int, first: str):
    found = [Fake("cudnn"), Fake("fa4", IS_EXTRA=True)]
    sizes = {"b": 4, "t": t, "s": t, "n": 32, "k": 8, "h": 128, "v": 128, "dtype": "bfloat16"}
    case = Case("call", **sizes, mask_mod=("s <= t or s < x[b]", 3))
    call = spec_of(case.forward_options(), case.avals())
    for x in (call, call.backward(case.backward_options())):
        assert preferences.in_order(found, x, CUDA, _everywhere)[0].NAME == first


def test_rows_put_implementations_first_in_their_order(table):
    other = Fake("other")
    table(_row("xla", head_dim=[100, 200]), _row("other"), _row("extra"), _row("xla"))
    assert _names(_spec(), KERNEL, other, EXTRA, XLA) == ["other", "extra", "kernel", "xla"]
    assert _names(_spec(), KERNEL, EXTRA, XLA) == ["extra", "kernel", "xla"]
    assert _names(_spec(h=128), KERNEL, EXTRA, XLA) == ["xla", "kernel", "extra"]
    assert _names(_spec(h=128), KERNEL, EXTRA, XLA, device=CPU) == ["kernel", "extra", "xla"]
    assert _names(_spec(), KERNEL, XLA) == ["xla", "kernel"]


def test_extra_comes_first_by_rewrites_only_where_its_row_says_so(table):
    table(_row("extra"))
    assert _names(_spec(), KERNEL, REFUSES, XLA) == ["kernel", "extra", "xla"]
    table(_row("extra", by_rewrites=True))
    assert _names(_spec(), KERNEL, REFUSES, XLA) == ["extra", "kernel", "xla"]
    other = Fake("extra", PLATFORM="rocm", IS_EXTRA=True)
    assert _names(_spec(), KERNEL, other, XLA) == ["kernel", "extra", "xla"]


@pytest.mark.parametrize(
    ("wanted", "fitting", "other"),
    [
        ({"features": ""}, {"window": (3, 0)}, {"sinks": 1}),
        ({"features": "sinks"}, {"sinks": 1, "is_causal": True}, {"sinks": 1, "soft_cap": 3.0}),
        ({"has_window": False}, {"is_causal": True}, {"window": (3, 0)}),
        ({"causal": True}, {"is_causal": True}, {}),
        ({"batch": [4, 8]}, {"b": 4}, {"b": 3}),
        ({"head_dim": [257, 512]}, {"h": 320}, {"h": 256}),
        ({"sequences": "whole rows"}, {}, {"kv_lengths": (3, 4)}),
        ({"sequences": ["lengths", "cu_seqlens"]}, {"kv_lengths": (3, 4)}, {}),
        ({"direction": "forward"}, {}, None),
        ({"product": "H200"}, {}, None),
    ],
)
def test_rows_fit_calls_by_their_facts(table, wanted, fitting, other):
    table(_row("extra", **wanted))
    assert _names(_spec(**fitting), KERNEL, EXTRA)[0] == "extra"
    if other is not None:
        assert _names(_spec(**other), KERNEL, EXTRA)[0] == "kernel"
    elif "product" in wanted:
        assert _names(_spec(), KERNEL, EXTRA, device=parse("h100"))[0] == "kernel"
    else:
        case = Case("preferred", dtype="bfloat16")
        assert _names(_spec().backward(case.backward_options()), KERNEL, EXTRA)[0] == "kernel"


def test_xla_is_preferred_without_a_warning_and_never_under_the_error_policy(table, monkeypatch):
    table(_row("xla"))
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (KERNEL, XLA))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select.choose(_spec(), CUDA).NAME == "xla"
        assert not select.has_kernel(_spec(), CUDA)
        with attn_dispatch.fallback("error"):
            assert select.choose(_spec(), CUDA).NAME == "kernel"
            assert select.has_kernel(_spec(), CUDA)


def test_xla_is_not_preferred_where_no_kernel_runs_the_call(table, monkeypatch):
    """Then the warning of a fallback says why."""
    table(_row("xla"))
    refuses = Fake("kernel", ("a head dim of 512",))
    assert _names(_spec(), refuses, XLA) == ["kernel", "xla"]
    assert _names(_spec(), refuses, EXTRA, XLA)[0] == "xla"
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (refuses, XLA))
    with pytest.warns(attn_dispatch.AttentionFallbackWarning, match="a head dim of 512"):
        assert select.choose(_spec(), CUDA).NAME == "xla"


@needs_cudnn
def test_a_backward_pass_that_no_kernel_runs_is_a_fallback():
    """The rows put XLA first there, before fa4, which is not built."""
    spec = _spec(b=1, t=2048, s=2048, n=8, k=8, h=512, v=512)
    backward = spec.backward(Case("preferred", dtype="bfloat16").backward_options())
    assert not backward.wanted.derivative
    with attn_dispatch.target("h200"), pytest.warns(attn_dispatch.AttentionFallbackWarning):
        assert select.choose(backward, CUDA).NAME == "xla"


@needs_cudnn
def test_xla_is_not_preferred_where_it_takes_much_memory():
    def first(**facts: Any) -> str:
        with attn_dispatch.target("h200"):
            return select.asked_in_order(_spec(h=512, v=512, **facts), CUDA)[0][0].NAME

    assert first(t=8192, s=8192, n=8, k=4) == "xla"
    assert first(b=8, t=65536, s=65536, n=16, k=16) == "cudnn"
    assert first(t=1024, s=2**20, n=8, k=8) == "cudnn"
    with attn_dispatch.scratch_limit("1MB"):
        assert first(t=8192, s=8192, n=8, k=4) == "cudnn"


@pytest.mark.parametrize("facts", [{"dtype": "float32"}, {"b": 0}], ids=str)
def test_calls_that_only_xla_runs_keep_their_order(table, facts):
    table(_row("xla"))
    assert _names(_spec(**facts), KERNEL, XLA) == ["kernel", "xla"]


def test_rows_of_the_table_are_sound():
    for row in preferences.rows():
        assert row.keys() <= {"first", "by_rewrites", "calls", "measured"}, row
        assert row["first"] in select.names() and row["calls"].keys() <= preferences.FACTS, row
        assert "arch" in row["calls"] and (ROOT / row["measured"]).is_file(), row
        if row["first"] == "xla" or "by_rewrites" in row:
            # Another feature may be one that only a fallback, or a slow rewrite, computes.
            assert {"features", "sequences"} <= row["calls"].keys(), row
        if row["first"] == "xla":  # it mixes NaN of one sequence into others of the same row
            assert row["calls"]["sequences"] in ("whole rows", "lengths"), row
            assert "dropout" not in str(row["calls"]["features"]), row


_CALL = {"query": "bfloat16[16,197,12,64]", "key": "bfloat16[16,197,12,64]", "value": "key"}
_SINKS = {"query": "bfloat16[1,8192,64,64]", "key": "bfloat16[1,8192,8,64]", "value": "key",
          "sinks": "float32[64]", "is_causal": True}  # fmt: skip
_AS_IT_IS: dict[str, Any] = {"forward": {}, "backward": {}}
REPORT: dict[str, Any] = {
    "environment": {"device": "NVIDIA H100 80GB HBM3"},
    "cells": [
        {
            "name": "images", "call": _CALL, "rewrites": _AS_IT_IS,
            "forward": {"cudnn": 200.0, "flash": 300.0}, "forward_once": {"fa4": 2000.0},
            "forward_backward": {"cudnn": 900.0, "flash": 800.0},
        },
        {
            "name": "sinks", "call": _SINKS, "rewrites": {"forward": {"flash": ["sinks"]},
            "backward": {"flash": ["sinks"]}},
            "forward": {"cudnn": 1000.0, "flash": 800.0},
            "forward_backward": {"cudnn": 3000.0, "flash": 3000.0, "fa4": 10.0},
        },
        {
            "name": "wide", "call": {x: y.replace("64]", "512]") for x, y in _CALL.items()},
            "rewrites": _AS_IT_IS, "forward": {"cudnn": 20.0, "xla": 30.0},
            "forward_device": {"cudnn": 18.0, "xla": 12.0},
        },
        {
            "name": "of launches", "call": _CALL, "rewrites": _AS_IT_IS,
            "forward": {"cudnn": 90.0, "flash": 30.0},
        },
    ],
}  # fmt: skip
ROWS = (
    _row("xla", head_dim=[257, 512], direction="forward"),
    _row("flash", by_rewrites=True, features="sinks", direction="forward"),
    _row("flash", direction="backward", features=""),
)


def test_replay_names_each_cell_whose_choice_is_not_the_best():
    assert choices_replay.behind(REPORT, ROWS) == []
    texts = [str(x) for x in choices_replay.behind(REPORT, ())]
    assert texts == [
        "images, step: cudnn and cudnn takes 1.29 of the time of cudnn and flash",
        "sinks, forward: cudnn takes 1.25 of the time of flash",
        "sinks, step: cudnn and cudnn takes 1.07 of the time of flash and cudnn",
        "wide, forward: cudnn takes 1.50 of the time of xla",
    ]


@pytest.mark.parametrize("left_out", range(len(ROWS)))
def test_replay_needs_every_row(left_out: int):
    assert choices_replay.behind(REPORT, ROWS[:left_out] + ROWS[left_out + 1 :])


def test_replay_rejects_xla_where_it_was_left_out():
    (found, *_) = choices_replay.behind(REPORT, (_row("xla"),))
    assert found.chosen == "xla" and found.ratio == float("inf")


@pytest.mark.parametrize("without", choices_replay.MISSING, ids=lambda x: "-".join(("no", *x)))
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_table_chooses_the_best_in_every_measured_cell_or_the_cause_is_listed(
    path: Path, without: tuple[str, ...]
):
    found = choices_replay.behind(choices_replay.read(path), preferences.rows(), without)
    listed = {
        (x["cell"], x["direction"])
        for x in preferences.losses()
        if x["file"] == path.name and tuple(x["without"]) == without
    }
    unlisted = [str(x) for x in found if (x.cell, x.direction) not in listed]
    assert not unlisted, "\n".join(unlisted)
    assert listed == {(x.cell, x.direction) for x in found}, "listed, and not behind"


def test_every_row_that_was_made_from_these_files_is_needed():
    rows, reports = preferences.rows(), [choices_replay.read(x) for x in RESULTS]
    names = [x.relative_to(ROOT).as_posix() for x in RESULTS]

    def count(rows: list[Row]) -> int:
        return sum(
            len(choices_replay.behind(x, rows, without))
            for x in reports
            for without in choices_replay.MISSING
        )

    usual = count(rows)
    unneeded = [
        row
        for i, row in enumerate(rows)
        if row["measured"] in names and count(rows[:i] + rows[i + 1 :]) <= usual
    ]
    assert not unneeded
