"""The cost model of a call whose sequence is spread over devices: its sizes, devices and costs.

The model is of one attention call on devices that compute nothing else meanwhile. Its formulas are
in `strategy_costs.py`; docs/speed.md compares it with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.reason import Reason, sentences
from attn_dispatch.text import in_units

TILE = 128
"""Queries and keys of a kernel's tile. The tiles at both ends of a window are computed whole, and a
halo sends whole tiles of keys."""

PACKED_IMBALANCE = {1: 1.7, 32: 2.1}
"""The busiest device's work over the mean, for packed documents in zigzag order, from so many
devices on: 1.45 to 2.1 on 8 and 1.8 to 2.4 on 32, for documents drawn from three distributions,
131,072 tokens. In the order of documents it is 1."""

PACKED_RINGS: Mapping[SequenceOrder, float] = {
    "contiguous": 1.12, "zigzag": 1.07, "documents": 1.24,
}  # fmt: skip
"""The measured time of a ring of packed documents over the sum of what is modelled, by the order of
its rows: forward and backward, 131,072 tokens on four H200 at f43df74b
(benchmarks/results/context_four_anew-NVIDIA_H200-9_19_0.json). Its pieces are short, and the
clearing, merging and copying between them is not modelled."""

MOST_GATHERED = 4 << 30
"""Bytes that a device may use for the keys, values and gradients of other devices."""

_TIE = 1.05
"""Exchanged heads are chosen if they cost up to so many times the cheapest strategy: they need no
order, are balanced for all documents, and their results are one kernel's."""


@dataclass(frozen=True)
class SpreadCall:
    """A call whose rows and keys are spread over devices, with the sizes of all of them."""

    batch: int
    """The batch rows that the devices of the axis compute together."""
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    width: int = 2
    """Bytes per number."""
    is_causal: bool = True
    window: int | None = None
    """Keys before its own position that a query sees at most."""
    longest: int | None = None
    """The length of packed documents; None for one sequence."""
    order: SequenceOrder = "contiguous"
    """The order of rows and keys."""

    @cached_property
    def pairs(self) -> float:
        """The pairs of a query and a key that kernels compute, for one head."""
        reach = min(self.longest or self.keys, self.keys)
        seen = reach - min(self.queries, reach) / 2 if self.is_causal else float(reach)
        if self.window is not None:
            seen = min(seen, self.window + 2 * TILE)
        return self.batch * self.queries * seen

    @property
    def work(self) -> float:
        """The floating-point operations of the forward pass: of two products, 2 for each number."""
        return 2 * self.pairs * self.heads * (self.head_dim + self.head_dim_v)

    @property
    def is_uneven(self) -> bool:
        """Whether late rows of contiguous order see more keys than early ones."""
        return self.is_causal and self.window is None

    @property
    def has_documents(self) -> bool:
        """Whether a row of the batch has several documents."""
        return self.longest is not None and self.longest < self.keys

    def unbalanced(self, devices: int) -> float:
        """The busiest device's work over the mean, where devices have different rows."""
        if not self.has_documents or not self.is_uneven or self.order == "documents":
            return 1
        return max(x for least, x in PACKED_IMBALANCE.items() if devices >= least)

    @property
    def query_bytes(self) -> float:
        return self.batch * self.queries * self.heads * self.head_dim * self.width

    @property
    def out_bytes(self) -> float:
        return self.batch * self.queries * self.heads * self.head_dim_v * self.width

    @property
    def kv_bytes(self) -> float:
        """Keys and values together."""
        width = (self.head_dim + self.head_dim_v) * self.width
        return self.batch * self.keys * self.kv_heads * width

    @property
    def kv_gradient_bytes(self) -> float:
        """Sums of the gradients of keys and values, in float32 at least."""
        return self.kv_bytes / self.width * max(self.width, 4)


@dataclass(frozen=True)
class Devices:
    """The devices along the axis; those of one node follow each other."""

    per_node: int
    nodes: int = 1

    @property
    def number(self) -> int:
        return self.per_node * self.nodes

    @staticmethod
    def of(number: int, node: int = 8) -> Devices:
        """So many devices on nodes of `node`. ValueError if they leave a node partly filled."""
        if number > node and number % node:
            raise ValueError(f"devices: expected at most {node} or a multiple of it, got {number}")
        return Devices(min(number, node), max(number // node, 1))


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


@dataclass(frozen=True)
class Hardware:
    """Where a call runs."""

    devices: Devices
    links: Links
    chip: Chip


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


@dataclass(frozen=True)
class Pass:
    """The costs of the forward or the backward pass for the most loaded device."""

    sent: float
    """Bytes that a device sends, the mean over all devices."""
    flops: float
    compute: float
    """Seconds in kernels and in local copies and sums."""
    exposed: float
    """Seconds of exchange during which the device waits."""
    hidden: float = 0.0
    """Seconds of exchange during which it computes."""
    gathered: float = 0.0
    """Bytes of memory for what it gathers from other devices, and for gradients of that."""

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


@dataclass(frozen=True)
class Cost:
    """What a strategy costs, or why it does not apply."""

    strategy: str
    reasons: tuple[Reason, ...] = ()
    """Why it does not apply. The costs are then None."""
    forward: Pass | None = None
    backward: Pass | None = None
    split: tuple[int, int] | None = None
    """For heads+ring: the devices that exchange heads, and those of a ring."""

    @property
    def mesh_axes(self) -> int:
        """How many mesh axes the sequence must be sharded along."""
        return 1 if self.split is None else 2

    def passes(self, *, needs_backward: bool = True) -> tuple[Pass, ...]:
        """The passes that a call makes; none if the strategy does not apply."""
        both = (self.forward, self.backward if needs_backward else None)
        return tuple(x for x in both if x is not None)

    def seconds(self, *, needs_backward: bool = True) -> float:
        """The modelled time; infinite if the strategy does not apply."""
        passes = self.passes(needs_backward=needs_backward)
        return sum(x.seconds for x in passes) if passes else math.inf

    def gathered(self, *, needs_backward: bool = True) -> float:
        """The most bytes of memory for what is gathered from other devices."""
        passes = self.passes(needs_backward=needs_backward)
        return max((x.gathered for x in passes), default=0.0)


def one_device(call: SpreadCall, chip: Chip) -> tuple[float, float]:
    """The seconds of both passes on a single device, which sends nothing."""
    return call.work / chip.forward, 2.5 * call.work / chip.backward


def choose(
    costs: Iterable[Cost], *, needs_backward: bool = True, most_gathered: float = MOST_GATHERED
) -> Cost | None:
    """The strategy with the least modelled time, heads if about as fast; None if none applies.

    Args:
      costs: the strategies' costs.
      needs_backward: whether both passes count.
      most_gathered: bytes that a strategy may gather. If nothing stays below, the one that gathers
        least is chosen.
    """
    able = [x for x in costs if not x.reasons]
    if not able:
        return None

    def gathered(cost: Cost) -> float:
        return cost.gathered(needs_backward=needs_backward)

    def rank(cost: Cost) -> float:
        seconds = cost.seconds(needs_backward=needs_backward)
        return seconds / _TIE if cost.strategy == "heads" else seconds

    within = [x for x in able if gathered(x) <= most_gathered]
    return min(within, key=rank) if within else min(able, key=gathered)


def table(costs: Iterable[Cost]) -> str:
    """The strategies in lines of text: bytes that a device sends, and modelled milliseconds."""
    rows: list[tuple[str, ...]] = [
        ("strategy", "sent forward", "sent backward", "forward", "backward", "gathered")
    ]
    notes: list[str] = []
    for cost in costs:
        if not (passes := cost.passes()):
            notes.append(f"{cost.strategy}: {sentences(cost.reasons)}")
            continue
        name = cost.strategy
        if cost.split is not None:
            name += " {} x {}".format(*cost.split)
            notes.append(
                f"{name}: takes two mesh axes, one of {cost.split[0]} devices for heads and one of "
                f"{cost.split[1]} for the ring"
            )
        sent = (in_units(round(x.sent)) for x in passes)
        times = (f"{x.seconds * 1e3:.3g} ms" for x in passes)
        rows.append((name, *sent, *times, in_units(round(cost.gathered()))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(x.rstrip() for x in (*lines, *notes))
