"""`attn-dispatch tune --rates`: measures drawn calls on this card, and keeps the rates that fit."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from attn_dispatch.core.choice.rates import (
    FILE,
    DeviceRates,
    devices_of,
    rates_for,
    text_of,
    users_file,
)
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import default_device
from attn_dispatch.files import reading, writing
from attn_dispatch.files.locking import locked
from attn_dispatch.files.user_folders import why_no_cache_path
from attn_dispatch_tools.bench.regret.draws import drawn
from attn_dispatch_tools.bench.regret.run import save, timed_rows
from attn_dispatch_tools.rates.fit import as_rates, fitted, neutral, parameters_of
from attn_dispatch_tools.rates.observations import measured_in, observations
from attn_dispatch_tools.reports.environment import environment

SECONDS = 120.0
_CALLS, _SEED = 120, 1
_SHORT = 0.006
"""Seconds of one measurement."""
_MAX_BYTES = 2**22


def measure(seconds: float = SECONDS) -> Path:
    """Measure as many calls as the time allows, and write the rates to the user's file.

    The fit starts from the rates of a similar card, so that what was not measured keeps those.

    Raises:
      SystemExit: this device has no kernels, no call was timed, or the file cannot be written.
    """
    device = default_device()
    file = users_file()
    if file is None:
        raise SystemExit(f"error: {why_no_cache_path(FILE)}: rates are not kept")
    if device.platform != "cuda":
        raise SystemExit(f"error: rates are for NVIDIA GPUs, and this is {device}")
    rows = list(
        timed_rows(
            drawn(_CALLS, _SEED),
            processes=max(1, (os.cpu_count() or 2) // 2),
            seconds=_SHORT,
            time_limit=seconds,
            is_alone=True,
        )
    )
    if not rows:
        raise SystemExit("error: no call was timed")
    report = file.with_name("rates_measured.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    save(report, environment(), rows)
    write(file, fitted_rates(device, report))
    return file


def fitted_rates(device: Device, report: Path) -> DeviceRates:
    """The rates of this device that fit a report of it best."""
    processors = getattr(jax.devices()[0], "core_count", 0) or 132
    found = observations(measured_in([report]), processors)
    similar = rates_for(device)
    prior = neutral() if similar is None else parameters_of(similar.rates)
    rates = as_rates(fitted(found, prior), found)
    known = {} if similar is None else dict(similar.rates)
    return DeviceRates(device.name, device.arch, processors, known | rates, (str(report),))


def write(file: Path, rates: DeviceRates) -> None:
    """Put a device's rates into a file, in place of earlier ones of it.

    Raises:
      OSError: the file cannot be written.
      ValueError: it holds something else, and is left as it is.
    """
    with locked(file.with_name(f".{file.name}.lock")):
        others: tuple[DeviceRates, ...] = ()
        if file.exists():
            others = devices_of(reading.json_file(file, _MAX_BYTES, is_kept=True))
        kept = tuple(x for x in others if x.name != rates.name)
        writing.replace(file, text_of((*kept, rates)).encode())
