"""What clearing padding costs packed calls on one GPU, beside FlashAttention-3's kernels alone.

usage: python benchmarks/finite_padding.py [--rounds N] [--seconds S] [--out FOLDER]

The documents of `attn-dispatch bench --grid packed`: 16,384 tokens, 32 query heads and 8 kv heads
of dim 128, bfloat16, causal, in arrays of the caller. All programs take turns, in which each
follows each other equally often.

dew-flash-attn        the kernels called directly, with nothing before or after
ours                  with cu_seqlens that are an argument of the jitted function
ours: finite padding  the same with finite_padding=True
ours: ids             segment ids with finite_padding=True
ours: known           cu_seqlens in NumPy, which show that there is no padding

It prints the wall and the device time of a call in µs, and dew-flash-attn's over it: 1 is the speed
of the kernels alone, and less is slower. Then the kernels that only ours runs, with their times.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from command import arguments, save

from attn_dispatch import dot_product_attention, ragged_dot_product_attention
from attn_dispatch_tools.bench.arrays import ROW, ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.measure import Options, measure
from attn_dispatch_tools.bench.peers.dew_flash_attn import DewFlashAttn
from attn_dispatch_tools.bench.peers.ours import Ours
from attn_dispatch_tools.bench.peers.peer import PeerCall
from attn_dispatch_tools.reports.environment import environment

KERNELS = "dew-flash-attn"
DIRECTIONS = ("forward", "forward_backward")


class Ids(Ours):
    def __init__(self):
        super().__init__(None)
        self.name = "ours: ids"

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        def attention(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return dot_product_attention(
                q, k, v, is_causal=True, query_segment_ids=ids, max_segments=len(cell.lengths),
                max_segment_len=cell.longest, finite_padding=True,
            )  # fmt: skip

        return PeerCall(attention, ROW, (arrays.segment_ids,))

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        return {}


class Known(Ids):
    def __init__(self):
        super().__init__()
        self.name = "ours: known"

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        ends = np.cumsum((0, *cell.lengths)).astype(np.int32)

        def attention(q: Any, k: Any, v: Any) -> Any:
            return ragged_dot_product_attention(
                q, k, v, is_causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends,
                max_seqlen_q=cell.longest, max_seqlen_kv=cell.longest,
            )  # fmt: skip

        return PeerCall(attention, ROWS)


PEERS = (DewFlashAttn(), Ours(None), Ours(None, finite_padding=True), Ids(), Known())


def kernels(peer: Any, cell: Cell, direction: str, arrays: CellArrays) -> dict[str, float]:
    """Microseconds of each kernel of a call, by its name."""
    program, calls = peer.program(cell, direction, arrays), 10
    program.seconds(2)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program.seconds(calls - 1)  # it runs once before it counts
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        found: dict[str, float] = {}
        for plane in data.planes:
            if plane.name.startswith("/device:GPU"):
                for event in (
                    x for y in plane.lines if y.name.startswith("Stream") for x in y.events
                ):
                    microseconds = (event.end_ns - event.start_ns) / 1e3 / calls
                    found[event.name] = found.get(event.name, 0) + microseconds
    return found


def main() -> None:
    args = arguments("What clearing padding costs packed calls.", rounds=20, seconds=0.03)
    facts = environment()
    print(f"{facts['device']}, JAX {facts['jax']}")
    report: dict[str, Any] = {"environment": facts, "cells": {}}
    options = Options(rounds=args.rounds, seconds=args.seconds)
    for cell, direction in itertools.product(GRIDS["packed"], DIRECTIONS):
        arrays = CellArrays(cell)
        rows = measure(cell, direction, PEERS, arrays, options)
        report["cells"][f"{cell.family}, {direction}"] = rows
        print(f"\n{cell.family}, {direction}")
        alone = rows[KERNELS]
        for name, row in rows.items():
            if "reason" in row:
                print(f"  {name:21s} {row['reason']}")
                continue
            wall, device = row["wall_us"]["median"], row["device_us"]
            line = f"  {name:21s} wall {wall:7.1f}"
            if "wall_us" in alone:
                line += f" ({alone['wall_us']['median'] / wall:.3f})"
            if device and alone.get("device_us"):
                line += f"   device {device:7.1f} ({alone['device_us'] / device:.3f})"
            print(line)
    for direction in DIRECTIONS:
        cell = GRIDS["packed"][0]
        arrays = CellArrays(cell)
        for peer in PEERS[:3]:
            try:
                found = kernels(peer, cell, direction, arrays)
            except Exception as error:  # the package may be absent, and the profiler may fail
                print(f"\n{peer.name}: no kernels, {type(error).__name__}: {str(error)[:200]}")
                continue
            report["cells"].setdefault("kernels", {})[f"{peer.name}, {direction}"] = found
            print(f"\n{cell.family}, {direction}: kernels of {peer.name}, µs in a call")
            for name, microseconds in sorted(found.items(), key=lambda x: -x[1]):
                print(f"  {microseconds:7.1f}  {name[:100]}")
    save("finite-padding", report, args.out)


if __name__ == "__main__":
    main()
