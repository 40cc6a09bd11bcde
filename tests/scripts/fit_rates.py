"""Fits core/choice/rates.json to committed measurements, and prints the regret of the result.

usage: python -m tests.scripts.fit_rates [--write] [--worst N]

The reports of each device are those in SOURCES. With --write it replaces rates.json, and
measured.json with the calls of which the model alone chooses too slow an implementation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import jax

from attn_dispatch import settings, xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.choice import order
from attn_dispatch.core.choice.rates import DeviceRates, digest_of, measured_times, text_of
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.rates.fit import as_rates, fitted, parameters_of
from attn_dispatch_tools.rates.observations import (
    NAMES,
    Measured,
    measured_in,
    observations,
    times_of,
)
from tests.support.replayed_rates import Replayed, replayed

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "dispatch/attn_dispatch/core/choice/measured.json"
RATES = ROOT / "dispatch/attn_dispatch/core/choice/rates.json"
_PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM and of an H200."""

_DEVICE = parse("h200")

_OUTDATED = {"choices": NAMES, "regret_2002": ("fa4",)}
"""By the beginning of a report's name, the implementations whose custom calls launch faster since
then: of short calls, only the device's times of theirs count."""
_EXCEPTION = 1.05
"""Measured calls with a larger regret are kept, and beat the model."""
_SHORT = 150.0
"""Microseconds of a short call."""

SOURCES = {
    "NVIDIA H200": (
        "choices-NVIDIA_H200-9_19_0.json",
        "regret_2002-NVIDIA_H200-9_19_0.json",
        "regret_3003-NVIDIA_H200-9_19_0.json",
        "regret_4004-NVIDIA_H200-9_19_0.json",
        "choices_absorbed-NVIDIA_H200-9_19_0.json",
        "choices_wide-NVIDIA_H200-9_19_0.json",
    ),
    "NVIDIA H100 80GB HBM3": (
        "choices-NVIDIA_H100_80GB_HBM3-9_19_0.json",
        "choices_ids-NVIDIA_H100_80GB_HBM3-9_19_0.json",
    ),
}
"""The reports in benchmarks/results by device. The fit of a device starts from the one before."""


def summary(found: Sequence[Replayed], worst: int = 12) -> list[str]:
    """The quantiles of the regret by direction and kind of time, and the worst calls."""
    lines: list[str] = []
    for direction, is_device in (("forward", 0), ("step", 0), ("forward", 1), ("step", 1)):
        of = [
            x for x in found if x.measured.direction == direction and x.is_device == bool(is_device)
        ]
        if not of:
            continue
        ratios = sorted(x.ratio for x in of)
        lines.append(
            f"{direction}{' on the device' if is_device else ''}: {len(of)} calls, median "
            f"{statistics.median(ratios):.3f}, 95 % {ratios[int(0.95 * len(ratios))]:.3f}, worst "
            f"{ratios[-1]:.3f}"
        )
    return lines + [f"  {x}" for x in sorted(found, key=lambda x: -x.ratio)[:worst]]


def read(paths: Sequence[Path]) -> list[Measured]:
    """The measured calls of reports, without times that the host takes no longer."""
    found: list[Measured] = []
    for path in paths:
        outdated = next((x for name, x in _OUTDATED.items() if path.name.startswith(name)), ())
        for x in measured_in([path]):
            is_short = min(x.wall.values(), default=0.0) < _SHORT
            wall = {n: us for n, us in x.wall.items() if not (is_short and n in outdated)}
            found.append(replace(x, wall=wall))
    return found


def regret(
    device: DeviceRates, measured: Sequence[Measured], *, has_cells: bool = False
) -> list[Replayed]:
    """The regret of the model, alone or with the measured calls that beat it."""
    known = measured_times if has_cells else lambda *_, **__: {}
    name = replace(_DEVICE, name=device.name)

    def first(spec: AttentionSpec, names: Sequence[str], is_alone: bool) -> str:
        now = replace(settings.current(), is_alone=is_alone)
        timed = [_Timed(x, None if x == "xla" else "cuda") for x in names]
        with (
            settings.restored(now),
            mock.patch.object(order, "rates_for", lambda _: device),
            mock.patch.object(order, "measured_times", known),
        ):
            return order.ranking(timed, spec, name, lambda *_: True).order[0].NAME

    with mock.patch.object(order, "reasons_and_chain", lambda *_: ((), None)):
        return replayed(measured, first)


@dataclass(frozen=True)
class _Timed:
    """An implementation as a report knows it."""

    NAME: str
    PLATFORM: str | None
    IS_EXTRA: bool = True

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        return xla.plan(spec, device)


def cells_text(kept: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """JSON with a line for each call."""
    devices = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(x)}: {json.dumps(y)}" for x, y in sorted(cells.items()))
        + "}"
        for name, cells in kept.items()
    )
    return "{\n" + ",\n".join(devices) + "\n}\n"


def exceptions(found: Sequence[Replayed]) -> dict[str, dict[str, dict[str, float]]]:
    """The measured calls for which the model chooses too slow an implementation, by digest."""
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for x in found:
        if x.ratio > _EXCEPTION:
            measured = x.measured
            name = f"{measured.direction}{'_device' if x.is_device else ''}"
            times = measured.device if x.is_device else measured.wall
            if len(times) < len(times_of(measured.row, measured.direction)[x.is_device]):
                continue  # some are outdated
            cells.setdefault(digest_of(measured.passes[0]), {})[name] = times
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits rates to committed measurements.")
    parser.add_argument("--write", action="store_true", help=f"write {RATES.name}")
    parser.add_argument("--worst", type=int, default=12)
    args = parser.parse_args()
    devices: list[DeviceRates] = []
    kept: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    prior = None
    for name, files in SOURCES.items():
        paths = [ROOT / "benchmarks/results" / x for x in files]
        measured = read(paths)
        arrays = observations(measured, _PROCESSORS)
        with jax.default_device(jax.devices("cpu")[0]):
            rates = as_rates(fitted(arrays, prior), arrays)
            prior = parameters_of(rates)
        sources = tuple(f"benchmarks/results/{x}" for x in files)
        devices.append(DeviceRates(name, "sm90", _PROCESSORS, rates, sources))
        found = regret(devices[-1], measured)
        kept[name] = exceptions(found)
        print(f"{name}: {len(arrays.time)} times of {len(measured)} calls")
        for line in summary(found, args.worst):
            print(line)
    text = text_of(tuple(devices))
    print(f"{len(text)} bytes")
    if args.write:
        RATES.write_text(text)
        MEASURED.write_text(cells_text(kept))


if __name__ == "__main__":
    main()
