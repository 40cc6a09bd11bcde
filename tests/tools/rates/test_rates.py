"""Fitting rates to times, replaying them, and the user's own file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.core.choice import rates as known_rates
from attn_dispatch.core.choice.rates import FILE, DeviceRates, Rate, devices_of, rates_for, text_of
from attn_dispatch.core.choice.time_model import predicted, together
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.bench.regret.draws import KINDS, drawn
from attn_dispatch_tools.bench.regret.summary import regrets, table
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, STEP, TimedCall
from attn_dispatch_tools.rates.fit import as_rates, fitted, parameters_of
from attn_dispatch_tools.rates.measure import write
from attn_dispatch_tools.rates.observations import Measured, measured_in, observations
from tests.support.replayed_rates import replayed

H200 = parse("h200")


def _packaged() -> DeviceRates:
    found = rates_for(H200)
    assert found is not None
    return found


def _modelled_report(folder: Path, calls: list[TimedCall], rates: DeviceRates) -> Path:
    """A report whose times are exactly those that rates predict."""
    rows: list[dict[str, Any]] = []
    for call in calls:
        row: dict[str, Any] = call.to_json() | {"default": {}}
        for direction in (FORWARD, STEP)[: 1 + call.is_training]:
            times: dict[str, float] = {}
            for name in ("cudnn", "flash", "fa4"):
                passes = [predicted(rates, name, x) for x in call.passes(direction)]
                if None not in passes:
                    host, device = (sum(getattr(x, y) for x in passes) for y in ("host", "device"))
                    times[name] = together(host, device)
            row[direction] = times
        rows.append(row)
    path = folder / "report.json"
    path.write_text(json.dumps({"calls": rows}))
    return path


def test_a_fit_finds_the_rates_that_made_the_times(tmp_path: Path):
    """Rates of a card that is faster in one implementation and slower in another."""
    similar = _packaged()

    def faster(rate: Rate, factor: float) -> Rate:
        return replace(rate, tile={x: factor * y for x, y in rate.tile.items()})

    factors = {"cudnn": 0.5, "flash": 2.0, "fa4": 1.0, "xla": 1.0}
    true = replace(similar, rates={x: faster(y, factors[x[0]]) for x, y in similar.rates.items()})
    calls = [x for x in drawn(60, 7) if x.kind in ("causal", "full", "window", "small")]
    measured = measured_in([_modelled_report(tmp_path, calls, true)])
    found = observations(measured, 132)
    rates = as_rates(fitted(found, parameters_of(similar.rates), steps=1500), found)
    for call in calls:
        (spec,) = call.passes(FORWARD)
        for name in ("cudnn", "flash"):
            wanted = predicted(true, name, spec)
            if wanted is not None and wanted.device > 60:
                got = predicted(replace(true, rates=rates), name, spec)
                assert got is not None and got.alone == pytest.approx(wanted.alone, rel=0.2)


def test_replay_compares_the_chosen_time_with_the_best_one():
    call = next(x for x in drawn(len(KINDS), 3) if x.kind == "causal")
    row = {"kind": "causal", "call": call.call,
           "forward": {"cudnn": 100.0, "fa4": 80.0},
           "step": {"cudnn": 300.0, "fa4": 400.0}}  # fmt: skip
    measured = [Measured(row, x, call.passes(x), dict(row[x]), {}) for x in (FORWARD, STEP)]
    (forward, step) = replayed(measured, lambda spec, names, is_alone: "cudnn")
    assert (forward.ratio, step.ratio) == (100 / 80, 1.0)
    (_, mixed) = replayed(measured, lambda spec, *_: "cudnn" if spec.is_backward else "fa4")
    assert mixed.microseconds == 300 + 80 - 100 and mixed.ratio < 1


def test_drawn_calls_are_the_same_everywhere_and_of_every_kind():
    once, again = drawn(60, 5), drawn(60, 5)
    assert [x.to_json() for x in once] == [x.to_json() for x in again]
    assert {x.kind for x in drawn(len(KINDS), 5)} >= {"causal", "paged", "ragged", "mask array"}
    assert drawn(1, 6)[0].to_json() != once[0].to_json()
    for call in once:
        assert TimedCall.from_json(json.loads(json.dumps(call.to_json()))).arguments.keys()


def test_regret_is_the_defaults_time_over_the_best_of_this_package():
    rows = [
        {"kind": "a", "call": {}, "default": {"forward": "cudnn", "step": "default"},
         "forward": {"cudnn": 110.0, "fa4": 100.0, "jax.nn": 50.0},
         "step": {"default": 90.0, "cudnn": 100.0, "fa4": 120.0}},
    ]  # fmt: skip
    forward, step = regrets(rows)
    assert (forward.ratio, forward.best, forward.peer) == (1.1, "fa4", "jax.nn")
    assert step.ratio == 0.9
    lines = table([forward, step])
    assert "median 1.100, 95 % 1.100, worst 1.100" in lines[0] and "2.20" in lines[1]


def test_the_users_rates_come_before_those_of_the_package(tmp_path: Path, monkeypatch):
    file = tmp_path / "rates.json"
    monkeypatch.setenv(FILE, str(file))
    packaged = _packaged()
    own = replace(packaged, name="NVIDIA H200", sources=("mine",))
    write(file, own)
    found = rates_for(H200)
    assert found is not None and found.sources == ("mine",)
    write(file, replace(own, name="NVIDIA A100-SXM4-80GB", arch="sm80"))
    assert [x.name for x in devices_of(json.loads(file.read_text()))] == [
        "NVIDIA H200", "NVIDIA A100-SXM4-80GB",
    ]  # fmt: skip
    a100 = rates_for(parse("a100"))
    assert a100 is not None and a100.arch == "sm80"
    assert devices_of(json.loads(text_of((own,)))) == (own,)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"devices": {"x": {"arch": "sm90"}}}', "null"])
def test_a_users_file_that_holds_no_rates_is_ignored_and_kept(tmp_path, monkeypatch, text):
    file = tmp_path / "rates.json"
    file.write_text(text)
    monkeypatch.setenv(FILE, str(file))
    assert known_rates.rates_for(H200) == _packaged()
    assert file.read_text() == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "fast"}, {"host": True}, {"host": [1]}, {"path": {}}, {"start": 1e306},
        {"start": float("nan")}, {"tile": {"64": -1.0}}, {"tile": 1.0}, {"host_times": []},
        {"megabyte": 0}, {"block": 10**400},
    ],
    ids=str,
)  # fmt: skip
def test_rates_that_are_no_numbers_are_refused(wrong):
    rate = next(iter(_packaged().rates.values())).to_json()
    with pytest.raises(ValueError, match=r"expected (a number|numbers)"):
        Rate.from_json(rate | wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"processors": 0}, {"processors": "132"}, {"rates": []}, {"rates": {"cudnn": []}},
        {"arch": "\x1b[31m"}, {"arch": ["sm90"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_users_file_with_wrong_fields_is_said_and_ignored(tmp_path, monkeypatch, caplog, wrong):
    content = json.loads(text_of((_packaged(),)))
    content["devices"]["NVIDIA H200"] |= wrong
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(content))
    monkeypatch.setenv(FILE, str(file))
    assert known_rates.rates_for(H200) == _packaged()
    assert "no rates are read" in caplog.text


def test_other_products_are_never_taken_for_a_measured_one():
    for name in ("NVIDIA H20", "NVIDIA H2000", "NVIDIA", ""):
        found = known_rates.rates_for(replace(H200, name=name))
        assert found is not None and "not here" in found.measured_on(replace(H200, name=name))
    assert "not here" not in _packaged().measured_on(H200)
