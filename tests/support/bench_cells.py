"""Small cells for the tests of the benchmark, and a run of its command."""

from __future__ import annotations

from attn_dispatch_tools import cli
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.measure import Options
from attn_dispatch_tools.bench.peers.ours import PEERS as OURS
from attn_dispatch_tools.bench.peers.peer import JaxPeer

TINY = Cell("tiny", "d8 causal", 1, 16, 2, 1, 8, 8)
DOCUMENTS = Cell("packed", "tiny documents", 1, 12, 2, 1, 8, 8, lengths=(5, 1, 6), longest=8)
WINDOW = Cell("window", "tiny window", 2, 16, 2, 2, 8, 8, window=5)
QUICK = Options(rounds=1, seconds=1e-4)


def ours() -> JaxPeer:
    return OURS[0]


def bench(capsys, *arguments: str) -> tuple[int | str | None, str, str]:
    status = None
    try:
        cli.main(["bench", *arguments])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def row(tflops: float, cell: Cell, direction: str) -> dict:
    us = cell.flops(direction) / tflops / 1e6
    return {
        "tflops": tflops, "memory_bytes": int(tflops) << 20, "device_us": 0.9 * us,
        "first_call_ms": {"total": tflops / 10, "compile": 1.0},
        "wall_us": {"median": us, "min": us, "quartiles": [0.9 * us, 1.1 * us]},
    }  # fmt: skip
