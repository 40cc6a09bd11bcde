"""What kernels receive of calls spread over eight devices, after XLA's partitioner; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts. XLA writes
the partitioned programs to a folder.

usage: python -m tests.core.context.received_kernels FOLDER LIBRARY ...
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text "
        "--xla_dump_hlo_pass_re=spmd-partitioning"
    )

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, target
from attn_dispatch.flash import library
from tests.support.partitioned import partition
from tests.support.spread_calls import COLLECTIVES

LENGTH, DIM = 4096, 128
ROWS = P(None, "context")

LIBRARIES = {
    "cudnn": ("cudnn", "cuda", "h100"),
    "flash": ("flash", "cuda", "h100"),
    "gfx942": ("aiter", "rocm", "gfx942"),
}
"""The implementation, the platform and the device."""

Kernels = dict[str, int]
"""The number of kernels by "rows x keys, heads/kv heads"."""


@dataclass(frozen=True)
class Case:
    """A call spread over devices, and what each of them shall compute and receive."""

    strategy: Any
    how: Any
    """"jit", or the order of rows in a shard_map."""
    kernels: Kernels
    """Those of the forward pass, and of the backward pass as well."""
    exchanged: tuple[str, ...]
    """The collectives that exchange floating-point arrays."""
    heads: tuple[int, int] = (12, 4)
    options: dict[str, Any] = field(default_factory=dict)
    is_packed: bool = False


CAUSAL: dict[str, Any] = {"is_causal": True}
PACKED: dict[str, Any] = {"is_causal": True, "max_segments": 4}
WINDOW: dict[str, Any] = {"local_window_size": (256, 0)}

WHOLE_OF_ONE_HEAD = {"4096 x 4096, 2/1": 1}
RING = {"512 x 512, 12/4": 1, "512 x 256, 12/4": 7, "256 x 512, 12/4": 7}
GATHERED = {"256 x 4096, 12/4": 2}
BEHIND, FIRST = {"512 x 768, 12/4": 1}, {"512 x 512, 12/4": 1}

TO_ALL, ON, ALL = ("all-to-all",), ("collective-permute",), ("all-gather", "reduce-scatter")

CASES = {
    "heads": Case("heads", "jit", WHOLE_OF_ONE_HEAD, TO_ALL, (16, 8), CAUSAL),
    "heads, window": Case("heads", "zigzag", WHOLE_OF_ONE_HEAD, TO_ALL, (16, 8), CAUSAL | WINDOW),
    "heads, packed": Case(
        "heads", "contiguous", WHOLE_OF_ONE_HEAD, TO_ALL, (16, 8), PACKED, is_packed=True
    ),
    "ring": Case("ring", "jit", RING, ON, options=CAUSAL),
    "ring, contiguous": Case("ring", "contiguous", RING, ON, options=CAUSAL),
    "ring, zigzag": Case("ring", "zigzag", RING, ON, options=CAUSAL),
    "ring, packed": Case("ring", "zigzag", RING, ON, options=PACKED, is_packed=True),
    "ring, full": Case("ring", "jit", {"512 x 512, 12/4": 8}, ON),
    "gather": Case("gather", "zigzag", GATHERED, ALL, options=CAUSAL),
    "gather, packed": Case("gather", "jit", GATHERED, ON + ALL, options=PACKED, is_packed=True),
    "halo": Case("halo", "jit", BEHIND | FIRST, ON, options=CAUSAL | WINDOW),
    "halo, packed": Case(
        "halo", "contiguous", BEHIND, ON, options=PACKED | WINDOW, is_packed=True
    ),
}  # fmt: skip
DECODING = {
    "cudnn": {"1 x 1024, 16/4": 1},
    "flash": {"193 x 1216, 16/4": 1},  # padded
    "gfx942": {"4 x 1024, 4/4": 1},  # heads of a group are rows
}
"""The kernels for one query of each of four batch rows, and a cache of 8,192 keys: batch rows are
whole, and keys are those of a device."""


def kernels(text: str, direction: str, batch: int) -> Kernels:
    """The kernels of a partitioned program, without those that clear rows."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if not re.search(rf'custom_call_target="attn_dispatch_\w+_{direction}', line):
            continue
        operands = re.findall(r"bf16\[([\d,]+)\]", line.partition("operand_layout_constraints")[2])
        shapes = [tuple(map(int, x.split(","))) for x in operands]
        # The other arrays before keys are like queries.
        query, key = list(dict.fromkeys(shapes))[:2]
        rows, keys = (_rows(x, batch) for x in (query, key))
        found[f"{rows} x {keys}, {query[-2]}/{key[-2]}"] += 1
    return dict(found)


def _rows(shape: tuple[int, ...], batch: int) -> int:
    """The rows of an array of one batch row, or of packed ones of equal lengths."""
    return shape[-3] if len(shape) == 4 else shape[0] // batch


def exchanged(text: str) -> list[str]:
    """The collectives of a program that exchange floating-point arrays."""
    found = re.findall(rf"= \(?(?:bf16|f32)\[.*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return sorted(set(found))


class Programs:
    """Programs for devices that are not there."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.implementation, self.platform, self.device = LIBRARIES[name]
        self.mesh = jax.make_mesh((8,), ("context",))

    def partitioned(self, function: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> str:
        """The program of one device."""
        with target(self.device), jax.set_mesh(self.mesh):
            traced = jax.jit(function).trace(*arrays)
            partition(traced.lower(lowering_platforms=(self.platform,)))
        (found,) = self.folder.glob("*after_spmd-partitioning*")
        text = found.read_text()
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()
        return text

    def array(self, *shape: int, spec: P = ROWS, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def of(self, case: Case) -> dict[str, Any]:
        """What the kernels of both passes receive."""

        def call(*arrays: Any) -> jax.Array:
            options = case.options | {"implementation": self.implementation}
            if case.is_packed:
                options |= {"query_segment_ids": arrays[3]}
            if case.how != "jit":
                options |= {"context_axis": "context", "sequence_order": case.how}
            return dot_product_attention(*arrays[:3], **options)

        heads, kv_heads = case.heads
        given = [self.array(1, LENGTH, n, DIM) for n in (heads, kv_heads, kv_heads)]
        given += [self.array(1, LENGTH, dtype=jnp.int32)] * case.is_packed
        specs = (ROWS,) * len(given)
        spread = call
        if case.how != "jit":
            spread = jax.shard_map(call, mesh=self.mesh, in_specs=specs, out_specs=ROWS)

        def both(q: Any, k: Any, v: Any, *ids: Any) -> Any:
            out, pull = jax.vjp(lambda *x: spread(*x, *ids), q, k, v)
            return out, pull(out)

        with context_parallel(case.strategy):
            text = self.partitioned(both, *given)
        passes = {x: kernels(text, x, 1) for x in ("forward", "backward")}
        return passes | {"exchanged": exchanged(text)}

    def decoding(self) -> dict[str, Any]:
        """What the kernels of a step of decoding receive, whose cache is spread."""

        def step(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
            return dot_product_attention(
                q, k, v, key_value_seq_lengths=lengths, implementation=self.implementation
            )

        batch = 4
        text = self.partitioned(
            step,
            self.array(batch, 1, 16, DIM, spec=P()),
            *[self.array(batch, 8192, 4, DIM)] * 2,
            self.array(batch, spec=P(), dtype=jnp.int32),
        )
        return {"forward": kernels(text, "forward", batch), "exchanged": exchanged(text)}


def reported(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case found, or its failure, which is one test's, not all tests'."""
    try:
        return run()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def main(folder: str, *names: str) -> None:
    library.version = lambda: library.VERSIONS[0]  # pyright: ignore[reportAttributeAccessIssue]
    report = {}
    for name in names:
        programs = Programs(Path(folder), name)
        runs = {x: partial(programs.of, case) for x, case in CASES.items()}
        report[name] = {x: reported(y) for x, y in runs.items()}
        report[name]["decoding"] = reported(programs.decoding)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
