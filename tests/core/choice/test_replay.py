"""The committed rates, replayed against the committed measurements."""

from __future__ import annotations

import statistics
from functools import cache

import pytest

from attn_dispatch.core.choice.rates import rates_for
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.rates.observations import Measured
from tests.scripts.fit_rates import ROOT, SOURCES, read, regret
from tests.support.replayed_rates import Replayed

DEVICES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}


@cache
def _measured(name: str) -> list[Measured]:
    return read([ROOT / "benchmarks/results" / x for x in SOURCES[name]])


@cache
def _replayed(target: str, has_cells: bool) -> list[Replayed]:
    rates = rates_for(parse(target))
    assert rates is not None and rates.name == DEVICES[target]
    return regret(rates, _measured(rates.name), has_cells=has_cells)


@pytest.mark.parametrize("target", DEVICES)
def test_without_measured_calls_the_model_alone_decides_well(target: str):
    ratios = sorted(x.ratio for x in _replayed(target, False) if not x.is_device)
    assert len(ratios) > 100
    assert statistics.median(ratios) <= 1.005
    assert ratios[int(0.95 * len(ratios))] <= 1.15


@pytest.mark.parametrize("target", DEVICES)
def test_measured_calls_beat_the_model_where_it_is_wrong(target: str):
    alone = [x.ratio for x in _replayed(target, False)]
    beaten = [x.ratio for x in _replayed(target, True)]
    assert sum(x > 1.05 for x in beaten) < 0.5 * sum(x > 1.05 for x in alone)
    assert statistics.mean(beaten) < statistics.mean(alone)
