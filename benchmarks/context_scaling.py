"""How attention over one long sequence scales to many devices, by the cost model.

Prints a table: the efficiency, one device's time / (devices · their time), forward and backward, of
the attention of one layer, and the strategy that takes least modelled time. One row of tokens,
bfloat16, causal, in contiguous order. No device is used. Kernels are as fast for any head dim as
for 128, and as long calls whatever the length.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from attn_dispatch.core.context.cost import (
    H100,
    H200,
    INFINITY_FABRIC,
    MI300X,
    NVLINK_4,
    Devices,
    Hardware,
    SpreadCall,
    choose,
    one_device,
)
from attn_dispatch.core.context.strategy_costs import costs

CHIPS = {"H100": H100, "H200": H200, "MI300X": MI300X}
LINKS = {"NVLINK_4": NVLINK_4, "INFINITY_FABRIC": INFINITY_FABRIC}
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

    def parts(self) -> dict[str, slice]:
        """The kinds of layers, each and all together, as parts of a list with one entry each."""
        each = {name: slice(i, i + 1) for i, name in enumerate(self.layers)}
        return each if len(each) == 1 else each | {"all": slice(None)}

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
    """The time of one layer's attention, forward and backward."""

    milliseconds: float
    strategy: str


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
    return Row(1e3 * sum(times), strategy)


def table(where: Hardware, node: int) -> str:
    """Efficiencies by model, length and layer, a column for each number of devices.

    A model with several kinds of layers has a row for each, and one for all layers together.
    """
    lines = [
        "| model | tokens | layers | " + " | ".join(f"{x} devices" for x in DEVICES) + " |",
        "|---" * (3 + len(DEVICES)) + "|",
    ]
    for name, model in MODELS.items():
        for length, tokens in LENGTHS.items():
            times = {
                number: [
                    modelled(name, x, tokens, replace(where, devices=Devices.of(number, node)))
                    for x in model.layers
                ]
                for number in (1, *DEVICES)
            }
            for kind, part in model.parts().items():
                alone = times[1][part]
                cells = (_cell(alone, times[number][part], number) for number in DEVICES)
                lines.append(f"| {name} | {length} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(alone: list[Row], spread: list[Row], devices: int) -> str:
    one, many = (sum(x.milliseconds for x in rows) for rows in (alone, spread))
    time = f"{many:,.0f} ms" if many >= 100 else f"{many:.3g} ms"
    strategy = f"{spread[0].strategy}, " if len(spread) == 1 else ""
    return f"{one / many / devices:.2f} ({strategy}{time})"


def _where(options: argparse.Namespace) -> Hardware:
    """The hardware that the options name, with links as they say."""
    links = LINKS[options.links]
    given = {name: getattr(options, name) for name in ("within", "to_one", "between")}
    changed = {name: x * 1e9 for name, x in given.items() if x is not None}
    if options.latency is not None:
        changed["latency"] = options.latency * 1e-6
    return Hardware(Devices(1), replace(links, **changed), CHIPS[options.chip])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="H100")
    parser.add_argument("--links", choices=LINKS, default="NVLINK_4")
    parser.add_argument("--node", type=int, default=8, help="devices of a node")
    for name in ("within", "to-one", "between"):
        parser.add_argument(f"--{name}", type=float, metavar="GB/s")
    parser.add_argument("--latency", type=float, metavar="US", help="microseconds of a transfer")
    options = parser.parse_args()
    print(table(_where(options), options.node))


if __name__ == "__main__":
    main()
