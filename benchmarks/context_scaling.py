"""How attention over one long sequence scales to many devices, by the cost model or as measured.

usage: python benchmarks/context_scaling.py [--chip H100] [--links NVLINK_4] [--node 8]
           [--within GB/s] [--to-one GB/s] [--between GB/s] [--latency US]
           [--measured JSON] [--out JSON]

Prints a table: the efficiency, one device's time / (devices · their time), forward and backward, of
the attention of one layer, and the strategy that takes least modelled time. One row of tokens,
bfloat16, causal, in contiguous order. No device is used. Kernels are as fast for any head dim as
for 128, and as long calls whatever the length.

--measured takes a JSON list of objects with model, layer, tokens, devices, forward_ms and
backward_ms, as --out writes them, and optionally strategy. These times replace modelled ones, one
device's too, and the table marks them with *.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from attn_dispatch.core.context import hardware
from attn_dispatch.core.context.cost import Devices, Hardware, SpreadCall, choose, one_device
from attn_dispatch.core.context.strategy_costs import costs

CHIPS = {"H100": hardware.H100, "H200": hardware.H200, "MI300X": hardware.MI300X}
LINKS = {"NVLINK_4": hardware.NVLINK_4, "INFINITY_FABRIC": hardware.INFINITY_FABRIC}
LENGTHS = {"128k": 131072, "1M": 1 << 20}
DEVICES = (8, 64, 512)


@dataclass(frozen=True)
class Model:
    """The attention of a model: its heads, and the window of each of its kinds of layers."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: Mapping[str, int | None]
    """Windows by the layer's name. There are equally many layers of each kind."""

    def call(self, layer: str, tokens: int) -> SpreadCall:
        dims = (self.head_dim, self.head_dim)
        window = self.layers[layer]
        return SpreadCall(1, tokens, tokens, self.heads, self.kv_heads, *dims, window=window)


MODELS = {
    "Qwen2.5-7B": Model(28, 4, 128, {"full": None}),
    "Llama 3 70B": Model(64, 8, 128, {"full": None}),
    "GPT-OSS 120B": Model(64, 8, 64, {"full": None, "window": 128}),
}
"""Heads, kv heads and head dims of their published configurations."""


@dataclass(frozen=True)
class Row:
    """The times of one layer's attention."""

    model: str
    layer: str
    tokens: int
    devices: int
    forward_ms: float
    backward_ms: float
    strategy: str = ""
    is_measured: bool = False

    @property
    def cell(self) -> tuple[str, str, int, int]:
        return self.model, self.layer, self.tokens, self.devices

    @property
    def milliseconds(self) -> float:
        return self.forward_ms + self.backward_ms


def modelled(name: str, layer: str, tokens: int, where: Hardware) -> Row:
    """The times of the strategy that the model chooses."""
    call, number = MODELS[name].call(layer, tokens), where.devices.number
    if number == 1:
        times, strategy = one_device(call, where.chip), "one device"
    else:
        chosen = choose(costs(call, where))
        if chosen is None:
            raise ValueError(f"{name}, {layer}, {number} devices: no strategy applies")
        times = [x.seconds for x in chosen.passes()]
        strategy = chosen.strategy
        if chosen.split is not None:
            strategy += " {} x {}".format(*chosen.split)
    forward, backward = (x * 1e3 for x in times)
    return Row(name, layer, tokens, number, forward, backward, strategy)


def rows(where: Hardware, node: int) -> Iterator[Row]:
    """The modelled times of all cells."""
    for name, model in MODELS.items():
        for tokens in LENGTHS.values():
            for number in (1, *DEVICES):
                there = replace(where, devices=Devices.of(number, node))
                for layer in model.layers:
                    yield modelled(name, layer, tokens, there)


def with_measured(rows: list[Row], measured: list[Row]) -> list[Row]:
    """The rows with measured times in place of modelled ones."""
    found = {x.cell: x for x in measured}
    unknown = found.keys() - {x.cell for x in rows}
    if unknown:
        raise ValueError(f"--measured: expected cells of the table, got {sorted(unknown)[0]}")

    def taken(row: Row) -> Row:
        if row.cell not in found:
            return row
        given = found[row.cell]
        strategy = given.strategy or row.strategy
        return replace(given, strategy=strategy, is_measured=True)

    return [taken(x) for x in rows]


def table(rows: list[Row]) -> str:
    """Efficiencies by model, length and layer, a column for each number of devices.

    A model with several kinds of layers has a row for each, and one for all layers together.
    """
    by_cell = {x.cell: x for x in rows}
    lines = [
        "| model | tokens | layers | " + " | ".join(f"{x} devices" for x in DEVICES) + " |",
        "|---" * (3 + len(DEVICES)) + "|",
    ]
    for name, model in MODELS.items():
        for length, tokens in LENGTHS.items():
            kinds = [[x] for x in model.layers]
            for layers in kinds if len(kinds) == 1 else [*kinds, list(model.layers)]:
                cells = (
                    _cell([by_cell[name, x, tokens, 1] for x in layers],
                          [by_cell[name, x, tokens, number] for x in layers])
                    for number in DEVICES
                )  # fmt: skip
                kind = layers[0] if len(layers) == 1 else "all"
                lines.append(f"| {name} | {length} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(alone: list[Row], spread: list[Row]) -> str:
    times = [sum(x.milliseconds for x in rows) for rows in (alone, spread)]
    efficiency = times[0] / times[1] / spread[0].devices
    mark = "*" * all(x.is_measured for x in spread)
    time = f"{times[1]:,.0f} ms" if times[1] >= 100 else f"{times[1]:.3g} ms"
    strategy = f"{spread[0].strategy}, " if len(spread) == 1 else ""
    return f"{efficiency:.2f}{mark} ({strategy}{time})"


def _where(options: argparse.Namespace) -> Hardware:
    """The hardware that the options name, with links as they say."""
    links = LINKS[options.links]
    given = {name: getattr(options, name) for name in ("within", "to_one", "between")}
    changed = {name: x * 1e9 for name, x in given.items() if x is not None}
    if options.latency is not None:
        changed["latency"] = options.latency * 1e-6
    return Hardware(Devices(1), replace(links, **changed), CHIPS[options.chip])


def main() -> None:
    parser = argparse.ArgumentParser(description="scaling of one sequence to many devices")
    parser.add_argument("--chip", choices=CHIPS, default="H100")
    parser.add_argument("--links", choices=LINKS, default="NVLINK_4")
    parser.add_argument("--node", type=int, default=8, help="devices of a node")
    for name in ("within", "to-one", "between"):
        parser.add_argument(f"--{name}", type=float, metavar="GB/s")
    parser.add_argument("--latency", type=float, metavar="US", help="microseconds of a transfer")
    parser.add_argument("--measured", type=pathlib.Path, help="times that replace modelled ones")
    parser.add_argument("--out", type=pathlib.Path, help="file for the times, as JSON")
    options = parser.parse_args()
    found = list(rows(_where(options), options.node))
    if options.measured is not None:
        measured = json.loads(options.measured.read_text("utf-8"))
        found = with_measured(found, [Row(**x) for x in measured])
    print(table(found))
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(x) for x in found], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
