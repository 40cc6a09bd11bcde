"""The measured times of reports, with what the model of time knows of each call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.choice.time_model import last_wave, pair_megabytes_of, tiles_of
from attn_dispatch.core.choice.work import HEAD_DIMS, TRAITS, head_dims_of, traits_of, work_of
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, STEP, TimedCall

NAMES = ("cudnn", "flash", "fa4", "xla")
"""The implementations whose rates are fitted."""

_KEYS = {FORWARD: ("forward",), STEP: ("step", "forward_backward")}
"""By direction, the keys of a report's line. Those by benchmarks/choices.py have other ones."""


@dataclass(frozen=True)
class Measured:
    """One call in one direction, with the microseconds of each implementation."""

    row: Mapping[str, Any]
    direction: str
    passes: tuple[AttentionSpec, ...]
    wall: dict[str, float]
    device: dict[str, float]
    """The device's own time, if it was measured."""


def measured_in(files: Iterable[Path]) -> list[Measured]:
    """The measured calls of reports by `attn-dispatch bench --regret` or benchmarks/choices.py."""
    found: list[Measured] = []
    for file in files:
        report = json.loads(file.read_text())
        for row in report.get("calls") or report["cells"]:
            call = TimedCall.from_json(row)
            for direction in (FORWARD, STEP):
                wall, device = times_of(row, direction)
                if wall or device:
                    found.append(Measured(row, direction, call.passes(direction), wall, device))
    return found


def times_of(row: Mapping[str, Any], direction: str) -> tuple[dict[str, float], dict[str, float]]:
    """The microseconds of a report's line by implementation: wall time, and the device's own."""
    wall: dict[str, float] = {}
    device: dict[str, float] = {}
    for key in _KEYS[direction]:
        wall |= row.get(f"{key}_once", {}) | row.get(key, {})
        device |= row.get(f"{key}_device", {})
    kept = (
        {name: us for name, us in times.items() if name in NAMES and us > 0}
        for times in (wall, device)
    )
    wall, device = kept
    return wall, device


@dataclass(frozen=True)
class Observations:
    """Arrays with one row for each measured time. The second axis of most is the pass."""

    name: np.ndarray
    """The index of the implementation in NAMES."""
    is_step: np.ndarray
    is_device: np.ndarray
    """1 for the device's own time, 0 for wall time."""
    time: np.ndarray
    group: np.ndarray
    """The same number for all times of one call, direction and kind of time."""
    dims: np.ndarray
    tiles: np.ndarray
    """Per processor."""
    longest: np.ndarray
    wave: np.ndarray
    blocks: np.ndarray
    """Per processor."""
    megabytes: np.ndarray
    pair_megabytes: np.ndarray
    traits: np.ndarray
    """[rows, 2, traits], 1 for those that the call has."""

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self.__dict__)


def observations(measured: Sequence[Measured], processors: int) -> Observations:
    """The arrays for measured calls."""
    rows: list[dict[str, Any]] = []
    for index, x in enumerate(measured):
        for is_device, times in ((0, x.wall), (1, x.device)):
            for name, time in times.items():
                passes = [_facts(spec, name, processors) for spec in x.passes]
                both = passes if len(passes) == 2 else passes * 2
                rows.append(
                    {
                        "name": NAMES.index(name),
                        "is_step": float(len(passes) == 2),
                        "is_device": float(is_device),
                        "time": time,
                        "group": 2 * index + is_device,
                    }
                    | {key: [y[key] for y in both] for key in both[0]}
                )
    integers = {"name", "group", "dims"}
    return Observations(
        **{
            key: np.asarray([x[key] for x in rows], np.int32 if key in integers else np.float32)
            for key in rows[0]
        }
    )


def _facts(spec: AttentionSpec, name: str, processors: int) -> dict[str, Any]:
    work, traits = work_of(spec), traits_of(spec)
    tiles, longest = tiles_of(work, traits, name)
    return {
        "dims": HEAD_DIMS.index(head_dims_of(spec)),
        "tiles": tiles / processors,
        "longest": longest,
        "wave": last_wave(tiles, work.blocks, processors),
        "blocks": work.blocks / processors,
        "megabytes": work.megabytes,
        "pair_megabytes": pair_megabytes_of(work, name),
        "traits": [float(x in traits) for x in TRAITS],
    }
