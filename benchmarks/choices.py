"""Speed of every implementation at many calls, from which core/preferences.json is made.

usage: python benchmarks/choices.py [--cells GLOB] [--seconds S] [--time-limit S] [--out FOLDER]

At each call all implementations that run it, as it is or by rewrites, take turns: forward, and
forward and backward with the gradients of query, key, value and sinks. XLA takes part where scores
are few or heads wide. An implementation that takes three times as long as the best one in its first
run is not timed further. For short calls there is device time too, which the lines show. The file
is saved after each call; tests/core/test_preferences.py replays it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from choice_cells import CELLS, Cell

from attn_dispatch import dot_product_attention, fa4, flash, ragged_dot_product_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.tuning.timing import orders, seconds_per_call, turns
from attn_dispatch.devices.target import default_device
from attn_dispatch.inspection import spec_of
from attn_dispatch_tools.bench.device_time import busy_seconds
from attn_dispatch_tools.bench.peers.peer import first_line
from attn_dispatch_tools.reports.environment import environment, file_name
from attn_dispatch_tools.terminal.name_patterns import matches
from attn_dispatch_tools.written_calls.json_file import arguments_of

_HOPELESS = 3.0
"""An implementation that takes this many times the best time is timed once."""
_LEAST_ROUNDS = 4
_MOST_PAIRS = 2**26
"""XLA is left out of calls of usual head dims with more scores than this."""
_COMPILED_AHEAD = 6
"""So many calls are compiled at a time, and then timed while nothing compiles."""
_LAUNCHES = 150.0
"""The device's busy time is measured as well where a forward pass takes fewer microseconds: in a
loop, such calls wait for the host, which launches them."""
_PROFILED_CALLS = 10
_GRADIENTS = ("query", "key", "value", "sinks")
DEFAULT = "default"
"""The name of the call without `implementation=`."""

DIRECTIONS = ("forward", "forward_backward")


@dataclass
class Prepared:
    """A cell with its arrays and compiled programs."""

    cell: Cell
    arrays: tuple[jax.Array, ...]
    programs: dict[str, dict[str, Callable[..., Any]]] = field(
        default_factory=lambda: {x: {} for x in DIRECTIONS}
    )
    """By direction and implementation."""
    compiled: list[Any] = field(default_factory=list)
    """Kept because JAX uses them for calls of the jitted functions."""
    rewrites: dict[str, dict[str, list[str]]] = field(
        default_factory=lambda: {"forward": {}, "backward": {}}
    )
    """The rewrites by which an implementation runs a pass; none for a pass that it refuses."""
    failed: dict[str, str] = field(default_factory=dict)


def arrays_of(cell: Cell) -> dict[str, jax.Array]:
    """The arrays of a call by name. Those that its text says are the same are one array."""
    made: dict[int, jax.Array] = {}
    found: dict[str, jax.Array] = {}
    for i, (name, x) in enumerate(arguments_of(cell.call).items()):
        if isinstance(x, jax.ShapeDtypeStruct):
            if id(x) not in made:
                made[id(x)] = jnp.asarray(_values(cell, name, x, jax.random.key(i)), x.dtype)
            found[name] = made[id(x)]
    return found


def _values(cell: Cell, name: str, x: jax.ShapeDtypeStruct, key: jax.Array) -> Any:
    lengths = cell.lengths
    if name.endswith("_segment_ids"):
        return np.broadcast_to(np.repeat(np.arange(len(lengths)) + 1, lengths), x.shape)
    if name.startswith("cu_seqlens"):
        return np.cumsum((0, *lengths))
    if name.endswith("_seq_lengths"):
        return np.asarray(lengths)
    if name == "alibi_slopes":
        return 2.0 ** -np.linspace(1, 8, x.shape[-1])
    return jax.random.normal(key, x.shape, x.dtype)


def step_of(
    cell: Cell, given: dict[str, jax.Array], implementation: str | None, direction: str
) -> Callable[..., Any]:
    """The program of the distinct arrays in `given` and, for both passes, the output's gradient."""
    arguments: dict[str, Any] = {**arguments_of(cell.call)}
    options = {x: y for x, y in arguments.items() if x not in given}
    is_ragged = "cu_seqlens_q" in given
    function: Any = ragged_dot_product_attention if is_ragged else dot_product_attention
    distinct = [*{id(x): x for x in given.values()}]
    places = {name: distinct.index(id(x)) for name, x in given.items()}
    wanted = [name for name in _GRADIENTS if name in given]

    def call(arrays: Sequence[jax.Array], differentiated: Sequence[jax.Array]) -> jax.Array:
        named = {name: arrays[place] for name, place in places.items()}
        named |= dict(zip(wanted, differentiated, strict=True))
        return function(**named, **options, implementation=implementation)

    def forward(out_grad: jax.Array, *arrays: jax.Array) -> jax.Array:
        return call(arrays, [arrays[places[x]] for x in wanted])

    def both(out_grad: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
        out, pull = jax.vjp(partial(call, arrays), [arrays[places[x]] for x in wanted])
        return out, *pull(out_grad)

    return forward if direction == "forward" else both


def prepared(cell: Cell, names: Sequence[str], pool: ThreadPoolExecutor) -> Callable[[], Prepared]:
    """Starts to compile a cell's programs; the returned function waits for them."""
    given = arrays_of(cell)
    v = given["value"].shape[-1]
    out_grad = jax.random.normal(jax.random.key(99), (*given["query"].shape[:-1], v), jnp.bfloat16)
    found = Prepared(cell, (out_grad, *{id(x): x for x in given.values()}.values()))

    def compile(name: str, direction: str) -> None:
        implementation = None if name == DEFAULT else name
        try:
            jitted = jax.jit(step_of(cell, given, implementation, direction))
            found.compiled.append(jitted.lower(*found.arrays).compile())
        except Exception as error:
            found.failed[f"{name}, {direction}"] = first_line(error)
        else:
            found.programs[direction][name] = jitted

    def prepare(name: str) -> None:
        directions = DIRECTIONS if cell.is_training else DIRECTIONS[:1]
        if name != DEFAULT:
            chains = chains_of(cell, name)
            for x, chain in chains.items():
                found.rewrites[x][name] = chain
            needed = {"forward": {"forward"}, "forward_backward": {"forward", "backward"}}
            directions = [x for x in directions if needed[x] <= chains.keys()]
        for direction in directions:
            compile(name, direction)

    waiting = [pool.submit(prepare, name) for name in names if name != "xla" or _may_use_xla(cell)]

    def wait() -> Prepared:
        for x in waiting:
            x.result()
        return found

    return wait


def specs_of(cell: Cell) -> dict[str, AttentionSpec]:
    """The specs of both passes of a training step."""
    spec = spec_of(**arguments_of(cell.call))
    gradients = tuple(x for x in _GRADIENTS if spec.has(x))
    return dict(zip(("forward", "backward"), spec.in_training(gradients), strict=True))


def chains_of(cell: Cell, name: str) -> dict[str, list[str]]:
    """By pass, the names of the rewrites by which the implementation runs it, if it does."""
    device, found = default_device(), {}
    if select.named(name).unusable_reason(device):
        return {}
    for x, spec in specs_of(cell).items():
        if (choice := select.by_engine(spec.by(name), device, name, "")) is not None:
            found[x] = list(choice.chain.names)
    return found


def _may_use_xla(cell: Cell) -> bool:
    spec = spec_of(**arguments_of(cell.call))
    pairs = spec.batch * spec.num_heads * spec.seq_len_q * spec.seq_len_kv
    return pairs <= _MOST_PAIRS or spec.head_dim > 256


def measure(found: Prepared, seconds: float) -> dict[str, Any]:
    """The cell's row of the file: its call, and by direction and implementation microseconds."""
    row: dict[str, Any] = {"name": found.cell.name, "call": found.cell.call}
    if found.cell.lengths:
        row["lengths"] = found.cell.lengths
    row["rewrites"] = {
        x: {name: names for name, names in chains.items() if names}
        for x, chains in found.rewrites.items()
    }
    for direction, programs in found.programs.items():
        if programs:
            row[direction], row[f"{direction}_once"] = _times(found, direction, seconds)
    if min(row.get("forward", {}).values(), default=_LAUNCHES) < _LAUNCHES:
        for direction in found.programs:
            if direction in row:
                row[f"{direction}_device"] = _busy(found, direction, row[direction])
    if found.failed:
        row["failed"] = found.failed
    return row


def _times(
    found: Prepared, direction: str, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The median times in turns, and the times of those that ran once."""
    once: dict[str, float] = {}
    for name, program in found.programs[direction].items():
        try:
            once[name] = min(seconds_per_call(program, found.arrays, 1) for _ in range(3))
        except Exception as error:
            found.failed[f"{name}, {direction}"] = first_line(error)
    best = min(once.values(), default=0.0)
    # A call of microseconds is no measure: below a tenth of a millisecond all are timed.
    kept = [x for x in once if once[x] <= max(_HOPELESS * best, 1e-4)]
    timed = {x: partial(seconds_per_call, found.programs[direction][x], found.arrays) for x in kept}
    count = len(orders(len(timed))) if timed else 1
    rounds = count * -(-_LEAST_ROUNDS // count)
    times = {x: statistics.median(y) for x, y in turns(timed, rounds, seconds).items()}
    rest = {x: y for x, y in once.items() if x not in times}
    return _microseconds(times), _microseconds(rest)


def _busy(found: Prepared, direction: str, names: Iterable[str]) -> dict[str, float]:
    """The times for which these programs keep the device busy."""
    times: dict[str, float] = {}
    for name in names:
        program = found.programs[direction][name]

        def run(program: Callable[..., Any] = program) -> None:
            results = [program(*found.arrays) for _ in range(_PROFILED_CALLS)]
            jax.block_until_ready(results)

        seconds, why = busy_seconds(run)
        if seconds is None:
            found.failed[f"{name}, {direction}, device time"] = why
        else:
            times[name] = seconds / _PROFILED_CALLS
    return _microseconds(times)


def _microseconds(times: dict[str, float]) -> dict[str, float]:
    return {x: round(1e6 * y, 2) for x, y in times.items()}


def rows_of(
    cells: Sequence[Cell], names: Sequence[str], seconds: float, is_over: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """The row of each cell, until the time is over."""
    with ThreadPoolExecutor(12) as pool:
        for i in range(0, len(cells), _COMPILED_AHEAD):
            if is_over():
                return
            waiting = [prepared(x, names, pool) for x in cells[i : i + _COMPILED_AHEAD]]
            ready = [wait() for wait in waiting]
            while ready:
                if is_over():
                    return
                yield measure(ready.pop(0), seconds)


def save(path: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the file, with one line for each cell."""
    lines = ",\n ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"environment": {json.dumps(facts)},\n"cells": [\n {lines}\n]}}\n')


def _line(row: dict[str, Any]) -> str:
    parts = []
    for direction in DIRECTIONS:
        times = row.get(f"{direction}_device") or row.get(direction, {})
        best = min(times.values(), default=0.0)
        cells = (f"{x} {y:.0f}{'*' * (y == best)}" for x, y in times.items())
        parts.append(", ".join(cells) or "-")
    return f"{row['name']:44s} {' | '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of every implementation at many calls.")
    parser.add_argument("--cells", action="append", metavar="GLOB", help="may be repeated")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cells")
    parser.add_argument("--seconds", type=float, default=0.03, help="length of one measurement")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--default", action="store_true", help="time the default choice as well")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the JSON")
    args = parser.parse_args()
    started = time.monotonic()
    cells = [x for x in CELLS if any(matches(x.name, y) for y in args.cells or ["*"])][args.skip :]
    if not cells:
        sys.exit(f"error: no cell is named like {args.cells}")
    device = default_device()
    usable = [x.NAME for x in select.implementations() if not x.unusable_reason(device)]
    names = [*([DEFAULT] if args.default else []), *usable]
    versions = dict(x for x in (flash.version(), fa4.version()) if x is not None)
    facts = environment() | {"extras": versions}
    kind = "choices" if len(cells) == len(CELLS) else f"choices_{started:.0f}"
    path, rows = args.out / f"{file_name(kind, facts)}.json", []
    print(f"{facts['device']}, {versions}: {', '.join(names)}; {len(cells)} cells; microseconds")
    warnings.simplefilter("ignore")
    for row in rows_of(
        cells, names, args.seconds, lambda: time.monotonic() - started > args.time_limit
    ):
        rows.append(row)
        save(path, facts, rows)
        print(f"{time.monotonic() - started:4.0f} s {_line(row)}", flush=True)
    print(f"{len(cells) - len(rows)} cells were not measured; {path}")


if __name__ == "__main__":
    main()
