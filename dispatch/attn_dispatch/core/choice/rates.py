"""Rates: how long each implementation takes for what a call consists of, by device and pass.

rates.json has those of the devices that were measured, fitted by `attn-dispatch tune --rates` or
tests/scripts/fit_rates.py. Those of a user's own device are in a file of the user's folder.

measured.json has measured calls for which the rates would choose a slower implementation, by
device: a digest of the call, and microseconds by implementation of the forward pass and of a step,
in a program of their own and, if measured, on the device alone. tests/scripts/fit_rates.py writes
it, together with the rates.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast  # noqa: TID251  # the JSON of measured rates

from attn_dispatch.call.options import Wanted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.tuning.winners import described
from attn_dispatch.devices.device import Device
from attn_dispatch.files import reading
from attn_dispatch.files.user_folders import cache_path

FILE = "ATTN_DISPATCH_RATES"
"""The environment variable that names the user's file; "off" reads none."""

_MAX_BYTES = 2**22
_FOLDER = resources.files("attn_dispatch.core.choice")
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
        single: dict[str, object] = {}
        for x in fields(Rate):
            value = found.get(x.name, {} if x.default is MISSING else x.default)
            if x.name == "traits":
                values[x.name] = tuple(map(str, value))
            elif x.type == "Numbers":
                if not isinstance(value, dict):
                    raise ValueError(f"{x.name}: expected numbers by name, got {value!r:.80}")
                values[x.name] = _numbers(cast("dict[object, object]", value), x.name)
            else:
                single[x.name] = value
        values |= _numbers(single)
        return Rate(**values)


def _numbers(given: Mapping[Any, object], name: str = "") -> dict[str, float]:
    """These values as numbers by name.

    Raises:
      ValueError: one is no number, or out of range. The message has `name`, or else the value's.
    """
    found: dict[str, float] = {}
    for key, x in given.items():
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < _MOST:
            expected = f"expected a number above 0 and below {_MOST:g}"
            raise ValueError(f"{name or key}: {expected}, got {x!r:.80}")
        found[str(key)] = float(x)
    return found


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


@lru_cache(maxsize=64)
def _packaged(name: str, arch: str) -> DeviceRates | None:
    """The package's rates of this device, else of another one of the same architecture."""
    known: dict[str, Any] = json.loads((_FOLDER / "rates.json").read_text())["devices"]
    alike = [x for x, found in known.items() if found["arch"] == arch]
    nearest = sorted(alike, key=lambda x: not is_same_product(x, name))
    return _device(nearest[0], known[nearest[0]]) if nearest else None


def rates_for(device: Device) -> DeviceRates | None:
    """The rates of this device, else of a measured one of the same architecture, if there is one.

    Rates that the user measured on such a device come before those of the package.
    """
    packaged = _packaged(device.name, device.arch)
    known = [x for x in (*_users(), packaged) if x is not None and x.arch == device.arch]
    named = [x for x in known if is_same_product(x.name, device.name)]
    return next(iter((*named, *known)), None)


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


_NOTHING = Wanted()

Times = Mapping[str, float]
"""Microseconds by implementation."""


def measured_times(
    forward: AttentionSpec, device: Device, *, is_step: bool, is_alone: bool
) -> Times:
    """The measured times of exactly this call; empty if it was not measured, or chosen well.

    Args:
      forward: the forward call.
      device: the device, which must be of the measured kind.
      is_step: whether the backward pass follows.
      is_alone: whether the call is all of its program.
    """
    same = (x for name, x in _cells().items() if is_same_product(name, device.name))
    cells = next(same, None)
    if not cells or (found := cells.get(digest_of(forward))) is None:
        return {}
    name = "step" if is_step else "forward"
    return found.get(name if is_alone else f"{name}_device", {})


def digest_of(forward: AttentionSpec) -> str:
    """A digest of the facts of a forward call that change its time."""
    text = json.dumps(described(forward.returning(_NOTHING)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _cells() -> Mapping[str, Mapping[str, Mapping[str, Times]]]:
    """By device, digest, and pass: "forward" or "step", with "_device" for the device alone."""
    return json.loads((_FOLDER / "measured.json").read_text())
