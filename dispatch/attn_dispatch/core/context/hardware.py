"""Links and chips for the cost model: speeds that are reached, with their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """The links of one device, in bytes per second and direction."""

    within: float
    """To all other devices of its node together."""
    to_one: float
    """To a single device of its node."""
    between: float
    """To other nodes."""
    latency: float = 10e-6
    """Seconds from one device to another, with the start of a transfer. An assumption."""


@dataclass(frozen=True)
class Chip:
    """What attention kernels reach on one device."""

    forward: float
    """Floating-point operations per second: long causal calls, 16 bits, heads of 128."""
    backward: float
    """The same of the backward pass alone."""
    memory: float
    """Bytes per second, reading and writing."""


INFINIBAND = 50e9
"""400 Gb/s for each GPU, as in DGX H100 (public specification)."""

NVLINK_4 = Links(within=350e9, to_one=350e9, between=INFINIBAND)
"""H100 and H200: 450 GB/s by specification, of which large transfers reach some 350. NVSwitch gives
a single peer all of it."""

INFINITY_FABRIC = Links(within=7 * 64e9, to_one=64e9, between=INFINIBAND)
"""MI300X: a link of 64 GB/s to each of seven peers (public specification); nothing was measured."""

H100 = Chip(forward=729e12, backward=591e12, memory=2.8e12)
"""Measured: 64 heads over 8 of 128, causal, 16,384 tokens: 729 TFLOP/s, 625 with the backward pass
(docs/bench/bench-NVIDIA_H100_80GB_HBM3-9_19_0.md). Memory: 85 % of 3.35 TB/s, an assumption."""

H200 = Chip(forward=662e12, backward=607e12, memory=4.0e12)
"""Measured: causal, 131,072 tokens: 662 TFLOP/s, 622 with the backward pass
(docs/bench/bench-NVIDIA_H200-9_19_0.md). Memory: 85 % of 4.8 TB/s, an assumption."""

MI300X = Chip(forward=500e12, backward=350e12, memory=4.3e12)
"""Assumptions, nothing was measured: 38 % and 27 % of the 1,307 TFLOP/s, and 81 % of the 5.3 TB/s,
that the public specification has."""
