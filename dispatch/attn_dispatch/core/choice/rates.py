"""Rates: how long each implementation takes for what a call consists of, by device and pass.

rates.json has those of the devices that were measured, fitted by `attn-dispatch tune --rates` or
tests/scripts/fit_rates.py. Those of a user's own device are in a file of the user's folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast  # noqa: TID251  # the JSON of measured rates

from attn_dispatch.devices.device import Device
from attn_dispatch.files import reading
from attn_dispatch.files.user_folders import cache_path

FILE = "ATTN_DISPATCH_RATES"
"""The environment variable that names the user's file; "off" reads none."""

_MAX_BYTES = 2**22
_MOST = 1e6
"""No rate is a second for one unit of what a call consists of."""

Numbers = Mapping[str, float]

_log = logging.getLogger("attn_dispatch")


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
          ValueError: a field is missing, or is not what it should be.
        """
        values: dict[str, Any] = {}
        for x in fields(Rate):
            value = found.get(x.name, {} if x.default is MISSING else x.default)
            if x.name == "traits":
                value = tuple(map(str, value))
            elif x.type == "Numbers":
                if not isinstance(value, dict):
                    raise ValueError(f"{x.name}: expected numbers by name, got {value!r:.80}")
                numbers = cast("dict[object, object]", value)
                value = {str(k): _number(y, x.name) for k, y in numbers.items()}
            else:
                value = _number(value, x.name)
            values[x.name] = value
        return Rate(**values)


def _number(x: object, name: str) -> float:
    if isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < _MOST:
        return float(x)
    raise ValueError(f"{name}: expected a number above 0 and below {_MOST:g}, got {x!r:.80}")


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
        if is_same_product(self.name, device.name):
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


def is_same_product(name: str, other: str) -> bool:
    """Whether two devices are the same product: "NVIDIA H100 80GB HBM3" is an "NVIDIA H100"."""
    words = name.split()[:2], other.split()[:2]
    return words[0] == words[1] and len(words[0]) == 2


def rates_for(device: Device) -> DeviceRates | None:
    """The rates of this device, else of a measured one of the same architecture, if there is one.

    Rates that the user measured on such a device come before those of the package.
    """
    known = (*_users(), *_packaged())
    named = [x for x in known if is_same_product(x.name, device.name) and x.arch == device.arch]
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind, text = type(error).__name__, str(error)[:200]
        _log.warning("%s: no rates are read: %s: %r", file, kind, text)
        return ()


def users_file() -> Path | None:
    """The file of rates that the user measured, which need not exist; None if there is none."""
    return cache_path(FILE, "rates.json")


def devices_of(file: Mapping[str, Any]) -> tuple[DeviceRates, ...]:
    """The devices of a file of rates.

    Raises:
      ValueError, KeyError, TypeError: the file is none.
    """
    return tuple(_device(name, x) for name, x in file["devices"].items())


def _device(name: str, found: Mapping[str, Any]) -> DeviceRates:
    arch, processors = found["arch"], found["processors"]
    are_texts = all(isinstance(x, str) and x.isprintable() and len(x) < 100 for x in (name, arch))
    if not are_texts or type(processors) is not int or not 0 < processors < 10_000:
        raise ValueError(
            f"expected a device's name, arch and number of processors, got {name!r:.80}, "
            f"{arch!r:.80} and {processors!r:.80}"
        )
    rates = {
        (implementation, direction): Rate.from_json(rate)
        for implementation, passes in found["rates"].items()
        for direction, rate in passes.items()
    }
    return DeviceRates(name, arch, processors, rates, tuple(map(str, found["sources"])))


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
