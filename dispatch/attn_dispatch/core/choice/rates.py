"""Rates: how long each implementation takes for what a call consists of, by device and pass.

rates.json has those of the devices that were measured, fitted by `attn-dispatch tune --rates` or
tests/scripts/fit_rates.py. Those of a user's own device are in a file of the user's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from attn_dispatch.devices.device import Device
from attn_dispatch.files import reading
from attn_dispatch.settings import cache_path

FILE = "ATTN_DISPATCH_RATES"
"""The environment variable that names the user's file; "off" reads none."""

_MAX_BYTES = 2**22

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Rate:
    """The rates of one implementation for one pass. Times are microseconds.

    The host takes `host`, times `host_times` of each trait. The device takes

        start + start_plus of each trait
        + tile[head dims] * tile_times of each trait * (
            tiles / processors + wave * tiles of the last wave's blocks
            + path * path_times of each trait * longest row of tiles
            + block * blocks / processors)
        + megabyte * megabytes * (1 + megabyte_plus of each trait) + pair_megabyte * pair megabytes
    """

    host: float
    start: float
    path: float
    wave: float
    block: float
    megabyte: float
    pair_megabyte: float
    tile: Numbers
    traits: tuple[str, ...] = ()
    """The traits of the calls that were measured. No time is predicted of calls with others."""
    host_times: Numbers = field(default_factory=dict[str, float])
    start_plus: Numbers = field(default_factory=dict[str, float])
    tile_times: Numbers = field(default_factory=dict[str, float])
    path_times: Numbers = field(default_factory=dict[str, float])
    megabyte_plus: Numbers = field(default_factory=dict[str, float])

    def knows(self, traits: tuple[str, ...]) -> bool:
        """Whether calls with these traits were measured."""
        return set(traits) <= set(self.traits)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Rate:
        """A rate of a file.

        Raises:
          ValueError: a field is missing, or no number.
        """
        values: dict[str, Any] = {x.name: found[x.name] for x in fields(Rate) if x.name in found}
        tables = [cast("dict[str, object]", x) for x in values.values() if isinstance(x, dict)]
        alone = [x for x in values.values() if not isinstance(x, dict)]
        values["traits"] = tuple(values.get("traits", ()))
        alone = [x for x in alone if not isinstance(x, list)]
        if not all(map(_is_number, (*alone, *(y for x in tables for y in x.values())))):
            raise ValueError(f"expected numbers from 0 to 1e9 in a rate, got {values}")
        return Rate(**values)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and 0 <= x < 1e9


@dataclass(frozen=True)
class DeviceRates:
    """The rates of a device."""

    name: str
    """The device's name, as the driver has it."""
    arch: str
    processors: int
    """Streaming multiprocessors, each of which computes one tile at a time."""
    rates: Mapping[tuple[str, str], Rate]
    """By implementation and pass, "forward" or "backward"."""
    sources: tuple[str, ...]
    """The files of measurements that the rates were fitted to."""

    def measured_on(self, device: Device) -> str:
        """Where the rates were measured, for people who read about a call on this device."""
        if self.name.startswith(device.name):
            return f"measured on {self.name}"
        return f"measured on {self.name}, not here; `attn-dispatch tune --rates` measures here"


@dataclass(frozen=True)
class Report:
    """What others measured on an architecture of which there are no rates."""

    first: str
    """The implementation that was the fastest."""
    source: str


PUBLIC_REPORTS: Mapping[str, Report] = {
    "sm80": Report(
        "flash",
        "transformers#48163: on an A100, FlashAttention-2 takes 0.82 of cuDNN's time",
    ),
    "sm86": Report("cudnn", "pytorch#192799: cuDNN is ahead on sm86"),
    "sm89": Report("cudnn", "pytorch#192799: cuDNN is ahead on sm89"),
    "sm120": Report(
        "flash",
        "transformers#48163: on an RTX PRO 6000, FlashAttention-2 takes 0.88 of cuDNN's time",
    ),
}


def rates_for(device: Device) -> DeviceRates | None:
    """The rates of this device, else of a measured one of the same architecture, if there is one.

    Rates that the user measured on such a device come before those of the package.
    """
    known = (*_users(), *_packaged())
    # "NVIDIA H100", a target, stands for "NVIDIA H100 80GB HBM3".
    named = [x for x in known if x.name.startswith(device.name)]
    alike = [x for x in known if x.arch == device.arch]
    return next(iter((*named, *alike)), None)


@cache
def _packaged() -> tuple[DeviceRates, ...]:
    file = resources.files("attn_dispatch.core.choice") / "rates.json"
    return devices_of(json.loads(file.read_text()))


def _users() -> tuple[DeviceRates, ...]:
    file = users_file()
    if file is None:
        return ()
    try:
        facts = file.stat()
    except OSError:
        return ()
    return _read(file, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=4)
def _read(file: Path, *_: int) -> tuple[DeviceRates, ...]:
    try:
        return devices_of(reading.json_file(file, _MAX_BYTES, is_kept=True))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def users_file() -> Path | None:
    """The file of rates that the user measured, which need not exist; None if there is none."""
    return cache_path(FILE, "rates.json")


def devices_of(file: Mapping[str, Any]) -> tuple[DeviceRates, ...]:
    """The devices of a file of rates.

    Raises:
      ValueError, KeyError, TypeError: the file is none.
    """
    return tuple(
        DeviceRates(
            name,
            x["arch"],
            x["processors"],
            {
                (implementation, direction): Rate.from_json(rate)
                for implementation, passes in x["rates"].items()
                for direction, rate in passes.items()
            },
            tuple(x["sources"]),
        )
        for name, x in file["devices"].items()
    )


def text_of(devices: tuple[DeviceRates, ...]) -> str:
    """The content of a file of rates: JSON with one line for each implementation and pass."""
    texts: list[str] = []
    for x in devices:
        by_name: dict[str, list[str]] = {}
        for (implementation, direction), rate in x.rates.items():
            line = f"{json.dumps(direction)}: {json.dumps(rate.to_json())}"
            by_name.setdefault(implementation, []).append(line)
        facts = {"arch": x.arch, "processors": x.processors, "sources": list(x.sources)}
        rates = ",\n".join(
            f"  {json.dumps(name)}: {{\n   " + ",\n   ".join(lines) + "}"
            for name, lines in by_name.items()
        )
        texts.append(f' {json.dumps(x.name)}: {json.dumps(facts)[:-1]}, "rates": {{\n{rates}}}}}')
    return '{"devices": {\n' + ",\n".join(texts) + "\n}}\n"
