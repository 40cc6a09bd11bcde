"""The predicted time of a pass of a call by one implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.choice.rates import DeviceRates, Rate
from attn_dispatch.core.choice.work import Work, head_dims_of, traits_of, work_of
from attn_dispatch.text import duration

SHARPNESS = 6.0
"""How sharply the longer of host and device decides: in a loop one waits for the other."""


@dataclass(frozen=True)
class Prediction:
    """The microseconds of one pass of a call."""

    host: float
    """What the host takes to launch it, if the call is a program of its own."""
    device: float
    """What the device takes."""

    def __str__(self) -> str:
        return f"{duration(self.device)} on the device, {duration(self.host)} to launch"

    @property
    def alone(self) -> float:
        """The time of the call as a program of its own."""
        return together(self.host, self.device)


def together(host: float, device: float) -> float:
    """The time per call in a loop, where the host launches while the device computes."""
    return float((host**SHARPNESS + device**SHARPNESS) ** (1 / SHARPNESS))


def predicted(rates: DeviceRates, implementation: str, spec: AttentionSpec) -> Prediction | None:
    """The time of the call by an implementation; None if its rate is not known."""
    rate = rates.rates.get((implementation, "backward" if spec.is_backward else "forward"))
    dims, traits = head_dims_of(spec), traits_of(spec)
    if rate is None or dims not in rate.tile or not rate.knows(traits):
        return None
    work = work_of(spec)
    return Prediction(
        rate.host * math.prod([rate.host_times.get(x, 1.0) for x in traits]),
        _device_time(rate, work, traits, rate.tile[dims], implementation, rates.processors),
    )


XLA_MARGIN = 1.1
"""XLA comes before kernels that are predicted to take this many times its time."""

XLA_LEAST = 10.0
"""The microseconds that XLA must save as well, if other operations are in the program."""


def _device_time(
    rate: Rate,
    work: Work,
    traits: tuple[str, ...],
    tile: float,
    implementation: str,
    processors: int,
) -> float:
    tiles, longest = tiles_of(work, traits, implementation)
    tile *= math.prod([rate.tile_times.get(x, 1.0) for x in traits])
    path = rate.path * math.prod([rate.path_times.get(x, 1.0) for x in traits])
    blocks = rate.block * work.blocks / processors
    wave = rate.wave * last_wave(tiles, work.blocks, processors)
    of_bytes = 1 + sum([rate.megabyte_plus.get(x, 0.0) for x in traits])
    return (
        rate.start
        + sum([rate.start_plus.get(x, 0.0) for x in traits])
        + tile * (tiles / processors + wave + path * longest + blocks)
        + rate.megabyte * work.megabytes * of_bytes
        + rate.pair_megabyte * pair_megabytes_of(work, implementation)
    )


def tiles_of(work: Work, traits: tuple[str, ...], implementation: str) -> tuple[float, float]:
    """The tiles that an implementation computes, and those of its longest row of tiles."""
    if implementation == "fa4":  # it takes lists of tiles
        return work.listed, work.longest_listed
    if implementation == "xla":
        return work.every, work.longest
    if "segment ids, any number" in traits:  # without a number, ids are a mask like any other
        return work.in_band, work.longest
    return work.tiles, work.longest


def pair_megabytes_of(work: Work, implementation: str) -> float:
    """The megabytes by pairs that an implementation reads and writes. XLA's scores are float32."""
    return work.pair_megabytes + (4 * work.scores if implementation == "xla" else 0.0)


def last_wave(tiles: float, blocks: float, processors: int) -> float:
    """The tiles of a block of mean length, for the share of processors that the last wave idles.

    Blocks of equal length take whole waves; a scheduler that starts with the longest ones fills
    some of the last wave.
    """
    idle = math.ceil(blocks / processors) - blocks / processors
    return idle * tiles / max(blocks, 1.0)
