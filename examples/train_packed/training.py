"""A run of training: batches in, losses out, with checkpoints on the way."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from . import checkpoint
from .clock import Clock
from .documents import checksum, standard_library
from .mesh import place_rows, state_placement
from .packing import Batch, Rows, batches, packed, padded
from .sizes import Size
from .step import Program, State

LAYOUTS = ("packed", "padded")


@dataclasses.dataclass(frozen=True)
class Task:
    size: Size
    mesh: Mesh
    layout: str = "packed"
    seed: int = 0
    checkpoints: Path | None = None
    every: int = 0
    """Steps between checkpoints; 0: only one, after the last step."""


@dataclasses.dataclass(frozen=True)
class Done:
    losses: list[float]
    """Of all steps, those before a resumed run too."""
    tokens_per_second: float
    """Real tokens, without the first step of this process and without compiling and saving."""
    step_seconds: float
    fill: float
    """The share of positions that hold real tokens. NaN, as both rates, where no step was left."""
    compile_seconds: float


def train(
    task: Task,
    *,
    resume: bool = False,
    until: int | None = None,
    on_step: Callable[[float, float, int], object] = lambda loss, rate, done: None,
) -> Done:
    """Trains to the last step, or `until` it.

    `on_step` gets the loss, tokens/s so far and how many steps are done.

    Raises:
      ValueError: a mesh that does not divide the model or the rows; a checkpoint of another run.
    """
    size, shape = task.size, task.size.shape
    documents = standard_library(shape.row_length, size.files)
    program = Program.new(size.config, size.learning_rate, size.steps)
    state, placement = _initial(program, task)
    facts = json.loads(json.dumps({
        "size": dataclasses.asdict(size), "layout": task.layout, "seed": task.seed,
        "documents": checksum(documents),
    }))  # fmt: skip
    losses: list[float] = []
    if resume and task.checkpoints and (path := checkpoint.latest(task.checkpoints)):
        losses = _same_run(path, facts)
        state = checkpoint.restore(path, state)
    first, last = len(losses), min(until or size.steps, size.steps)
    if first >= last:
        nan = float("nan")
        return Done(losses, nan, nan, nan, 0.0)
    # The documents of the steps before are drawn again, which costs nothing worth saving.
    stream = itertools.islice(batches(documents, shape, task.seed), first, last)

    started = time.perf_counter()
    max_segments = shape.max_segments if task.layout == "packed" else 1
    step = program.step(max_segments, placement)
    like = place_rows(_rows(task, Batch([], [])), task.mesh)
    compiled = step.lower(state, like).compile()
    clock = Clock(time.perf_counter() - started)

    pending: list[tuple[jax.Array, int]] = []

    def wait() -> None:
        """For the loss of the step before, if it is still to come."""
        if pending:
            losses.append(clock.arrived(*pending.pop()))
            on_step(losses[-1], clock.rate, len(losses))

    for index, batch in enumerate(stream, first):
        rows = place_rows(_rows(task, batch), task.mesh)
        state, loss = compiled(state, rows)
        wait()  # for the step before, while the device computes this one
        pending.append((loss, batch.tokens))
        is_due = index + 1 == last or (task.every and (index + 1) % task.every == 0)
        if task.checkpoints and is_due:
            wait()
            with clock.paused():
                checkpoint.save(task.checkpoints, index + 1, state, facts | {"losses": losses})
    wait()
    positions = like.tokens.size * (last - first)
    return Done(
        losses, clock.rate, clock.step_seconds, clock.all_tokens / positions, clock.compile_seconds
    )


def _initial(program: Program, task: Task) -> tuple[State, State]:
    """The state before the first step, made where it will lie, and a sharding for each array."""

    def make() -> State:
        return program.initial(task.size.config, task.seed)

    placement = state_placement(jax.eval_shape(make), task.size.config, task.mesh)
    return jax.jit(make, out_shardings=placement)(), placement


def _rows(task: Task, batch: Batch) -> Rows:
    return (packed if task.layout == "packed" else padded)(batch, task.size.shape)


def _same_run(path: Path, facts: dict[str, Any]) -> list[float]:
    """The losses that a checkpoint of the same run has."""
    found = checkpoint.read_facts(path)
    losses = found.pop("losses")
    if differing := _differing(facts, found):
        raise ValueError(f"{path}: expected a run with {differing}")
    return losses


def _differing(wanted: dict[str, Any], found: dict[str, Any], inside: str = "") -> str:
    """The first fact that is another, and both of its values; "" where all are the same."""
    for name, value in wanted.items():
        got = found.get(name)
        if isinstance(value, dict) and isinstance(got, dict):
            if deeper := _differing(value, got, f"{inside}{name} "):
                return deeper
        elif got != value:
            return f"{inside}{name} {value}, got {got}"
    return ""
