"""The table of preferences, replayed against the times of benchmarks/choices.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import attn_dispatch
from attn_dispatch import xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import preferences, select
from attn_dispatch.core.preferences import Row
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.devices.target import parse
from attn_dispatch.inspection import spec_of
from attn_dispatch.reason import Reason, reason_from_sentence
from attn_dispatch_tools.written_calls.json_file import arguments_of

RELATIVE, MICROSECONDS = 1.03, {"forward": 1.0, "step": 2.0}
"""How much slower than the best the chosen implementation may be: 3 %, because medians of the same
program differ by 1 to 2 % between runs, and as long as the host's launches of a call vary. A step's
time is the sum of a time and a difference of two, so that it varies twice as much."""

_LAUNCHES = 100.0
"""Shorter calls wait for the host, which launches them: only their device time is compared."""

_GRADIENTS = ("query", "key", "value", "sinks")


@dataclass(frozen=True)
class Behind:
    """A cell where the first implementation of the table's order is not the best one."""

    cell: str
    direction: str
    """ "forward", or "step": forward and backward."""
    chosen: str
    best: str
    ratio: float

    def __str__(self) -> str:
        where = f"{self.cell}, {self.direction}"
        return f"{where}: {self.chosen} takes {self.ratio:.2f} of the time of {self.best}"


@dataclass(frozen=True)
class _Timed:
    """An implementation as the file knows it: it refuses what it did not run as it is."""

    NAME: str
    IS_EXTRA: bool
    PLATFORM: str | None
    refuses: tuple[Reason, ...]

    def not_supported_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        return self.refuses

    def unusable_reason(self, device: Device) -> str:
        return ""

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        return xla.plan(spec, device) if self.PLATFORM is None else Plan(self.NAME, 0)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


MISSING: tuple[tuple[str, ...], ...] = ((), ("fa4",), ("flash",), ("flash", "fa4"))
"""The extras that a machine may lack: all are replayed."""


def behind(
    report: Mapping[str, Any], rows: Sequence[Row], without: Sequence[str] = ()
) -> list[Behind]:
    """The cells of a report where these rows choose an implementation that is not the best.

    Args:
      without: the extras that are not installed.
    """
    table = preferences.by_arch_and_direction(rows)
    device = device_of(report)
    cells = [_without(without, x) for x in report["cells"]]
    runs = mock.patch.object(preferences, "reasons_and_chain", lambda *_: ((), None))
    with (
        mock.patch.object(preferences, "_table", lambda: table),
        runs,
        attn_dispatch.fallback("warn"),
    ):
        return [x for cell in cells for x in _behind_in(cell, device)]


def device_of(report: Mapping[str, Any]) -> Device:
    """The device of a report, as if it were present."""
    name = report["environment"]["device"]
    return replace(parse(name.split()[1].lower()), name=name)


def _without(names: Sequence[str], cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell without the times of these implementations."""
    kept = {
        f"{x}{kind}": {y: us for y, us in cell[f"{x}{kind}"].items() if y not in names}
        for x in ("forward", "forward_backward")
        for kind in ("", "_once", "_device")
        if f"{x}{kind}" in cell
    }
    return {**cell, **kept}


def _behind_in(cell: Mapping[str, Any], device: Device) -> Iterator[Behind]:
    if min(cell["forward"].values(), default=0.0) < _LAUNCHES and "forward_device" not in cell:
        return
    forward, both = (_times(cell, x) for x in ("forward", "forward_backward"))
    backward = {x: both[x] - forward[x] for x in both if x in forward}
    spec, of_backward = _specs(json.dumps(cell["call"]))
    first = _first(spec, device, forward, cell["rewrites"]["forward"])
    yield from _compared(cell["name"], "forward", {"": 0.0}, "", forward, first)
    if backward:
        last = _first(of_backward, device, backward, cell["rewrites"]["backward"])
        yield from _compared(cell["name"], "step", forward, first, backward, last)


@cache
def _specs(call: str) -> tuple[AttentionSpec, AttentionSpec]:
    """The forward and the backward call."""
    spec = spec_of(**arguments_of(json.loads(call)))
    return spec, spec.in_training(tuple(x for x in _GRADIENTS if spec.has(x)))[1]


def _times(cell: Mapping[str, Any], direction: str) -> dict[str, float]:
    """Microseconds by implementation: of the device, if that was measured."""
    if found := cell.get(f"{direction}_device"):
        return found
    return cell.get(direction, {}) | cell.get(f"{direction}_once", {})


def _compared(
    cell: str,
    direction: str,
    before: Mapping[str, float],
    first: str,
    times: Mapping[str, float],
    chosen: str,
) -> Iterator[Behind]:
    """What is behind, if `first` takes its time of `before` and then `chosen` its own."""
    unknown = float("inf")  # the table chose XLA, which was left out because it takes long
    taken = before.get(first, unknown) + times.get(chosen, unknown)
    best = [min(x, key=lambda y, x=x: x[y]) for x in (before, times)]
    least = before[best[0]] + times[best[1]]
    if taken > RELATIVE * least + MICROSECONDS[direction]:
        together = [" and ".join(filter(None, x)) for x in ((first, chosen), best)]
        yield Behind(cell, direction, *together, taken / least)


def _first(
    spec: AttentionSpec,
    device: Device,
    times: Mapping[str, float],
    rewrites: Mapping[str, Sequence[str]],
) -> str:
    """The implementation that the table's order gives first, of those that run the call."""

    def timed(name: str) -> _Timed:
        module = select.named(name)
        why = rewrites.get(name, []) if name in times else ["it did not run the call"]
        refuses = tuple(reason_from_sentence(name, x) for x in why)
        return _Timed(name, module.IS_EXTRA, module.PLATFORM, refuses)

    known: Any = [timed(x.NAME) for x in select.IMPLEMENTATIONS]
    order = preferences.in_order(
        known, spec, device, lambda x, _: x.NAME in times or x.PLATFORM is None
    )
    return next(x.NAME for x in order if x.NAME in times or x.PLATFORM is None)
