"""XLA's blocks on the CPU, compared with an earlier revision's chunks of query rows.

usage: python benchmarks/xla_chunks.py [--rounds N] [--out FOLDER]

The earlier revision, which is taken from git, did not divide the batch and the heads. So with a
large batch, each chunk had few query rows, and all keys were read again for each chunk. The two
revisions take turns; each call runs in a new process, whose peak memory is measured as well. The
cells are a batch of 32 × 8192 keys with the query rows of one block, and a batch of 1 with long
sequences, which should take as long as before.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

if "--measure" in sys.argv:
    # PYTHONPATH names the revision, but the finder of an editable install would come before it.
    sys.meta_path = [x for x in sys.meta_path if "editable" not in type(x).__module__]

import attn_dispatch
from attn_dispatch import dot_product_attention, explain
from attn_dispatch_tools.reports.environment import environment

BEFORE = "7a25e16"
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, int]] = {
    "batch of 32": {"b": 32, "t": 32, "s": 8192, "n": 64, "k": 64, "h": 32},
    "batch of 1": {"b": 1, "t": 8192, "s": 8192, "n": 2, "k": 1, "h": 64},
}
DIRECTIONS = ("forward", "forward_backward")


def measure(b: int, t: int, s: int, n: int, k: int, h: int, direction: str) -> dict[str, Any]:
    """Time and memory of one call, with the attn_dispatch that this process imports."""
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, h), (b, t, n, h))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]

    def forward(q, k, v, out_grad):
        del out_grad
        return dot_product_attention(q, k, v, implementation="xla")

    def both(q, k, v, out_grad):
        out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, None), q, k, v)
        return out, *pull(out_grad)

    package = pathlib.Path(attn_dispatch.__file__).parents[1]
    assert package.samefile(os.environ["PYTHONPATH"]), package
    start = time.perf_counter()
    program = jax.jit(forward if direction == "forward" else both).lower(*arrays).compile()
    compiled = time.perf_counter()
    memory = program.memory_analysis()
    assert memory is not None
    jax.block_until_ready(arrays)
    resident = _forget_peak()
    called = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return {
        "seconds": time.perf_counter() - called,
        "compile_seconds": compiled - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes_beside_operands": _status("VmHWM") - resident,
        "plan": [x.strip() for x in str(explain(*arrays[:3])).splitlines() if "query rows" in x],
    }


def _forget_peak() -> int:
    """Reset the process' peak memory to its current memory, and return that in bytes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def in_a_process(package: pathlib.Path, shape: dict[str, int], direction: str) -> dict[str, Any]:
    """The result of `measure` in a new process, with the attn_dispatch in a folder."""
    given = json.dumps(shape | {"direction": direction})
    environ = os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}
    command = (sys.executable, __file__, "--measure", given)
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def by_turns(
    packages: dict[str, pathlib.Path], shape: dict[str, int], direction: str, rounds: int
) -> dict[str, Any]:
    """The medians of both revisions, and the ratio "before" over "after" of each number."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in packages}
    for round_index in range(rounds):
        for name in list(packages) if round_index % 2 == 0 else list(packages)[::-1]:
            runs[name].append(in_a_process(packages[name], shape, direction))
    numbers = [name for name, x in runs["after"][0].items() if not isinstance(x, list)]
    row: dict[str, Any] = {
        name: found[0] | {x: statistics.median(run[x] for run in found) for x in numbers}
        for name, found in runs.items()
    }
    row["before_over_after"] = {x: row["before"][x] / row["after"][x] for x in numbers}
    return row


def main() -> None:
    from command import arguments, save

    args = arguments("XLA's blocks against chunks of rows.", rounds=3, seconds=0)
    jax.config.update("jax_platforms", "cpu")
    facts = environment()
    print(f"{facts['device']}, JAX {facts['jax']}; before over after")
    report: dict[str, Any] = {"environment": facts, "before": BEFORE}
    with tempfile.TemporaryDirectory() as folder:
        archive = ("git", "-C", str(REPOSITORY), "archive", BEFORE, "dispatch")
        tar = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(("tar", "x", "-C", folder), input=tar, check=True)
        packages = {
            "before": pathlib.Path(folder) / "dispatch",
            "after": REPOSITORY / "dispatch",
        }
        for name, shape in SHAPES.items():
            report[name] = {"shape": shape}
            rounds = args.rounds if shape["b"] == 1 else 1  # a round of the other takes minutes
            for direction in DIRECTIONS:
                row = report[name][direction] = by_turns(packages, shape, direction, rounds)
                ratio = row["before_over_after"]
                print(
                    f"{name:12s} {direction:17s}"
                    f"{row['before']['seconds']:7.1f} s {row['after']['seconds']:7.1f} s"
                    f"   time {ratio['seconds']:5.2f}   compiling {ratio['compile_seconds']:5.2f}"
                    f"   temp {ratio['temp_bytes']:5.2f}"
                    f"   peak {ratio['peak_bytes_beside_operands']:5.2f}",
                    flush=True,
                )
    save("xla_chunks", report, args.out)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--measure", type=json.loads)
        print(json.dumps(measure(**parser.parse_args().measure)))
    else:
        main()
