"""A training run: a step for each batch, and checkpoints."""

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
from .step import State, Trainer

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
    """The results of a run. The two speeds and `fill` are NaN if no step was left to do."""

    losses: list[float]
    """The losses of all steps, including those before the run was resumed."""
    tokens_per_second: float
    """Real tokens, without padding; compiling, saving and the first step do not count."""
    step_seconds: float
    fill: float
    """The share of positions that hold real tokens."""
    compile_seconds: float


def train(
    task: Task,
    *,
    resume: bool = False,
    until: int | None = None,
    on_step: Callable[[float, float, int], object] = lambda loss, rate, done: None,
) -> Done:
    """Train to the last step.

    Args:
      task: what to train.
      resume: whether to continue from the latest checkpoint, if there is one.
      until: the step after which to stop; by default the last one.
      on_step: called with the loss, the tokens/s so far and the number of steps that are done.

    Raises:
      ValueError: the mesh does not divide the model or the rows, or the checkpoint is of another
        run.
    """
    size, shape = task.size, task.size.shape
    documents = standard_library(shape.row_length, size.files)
    trainer = Trainer.new(size.config, size.learning_rate, size.steps)
    state, placement = _initial(trainer, task)
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
    # The batches of earlier steps are drawn again, which takes little time.
    stream = itertools.islice(batches(documents, shape, task.seed), first, last)

    started = time.perf_counter()
    max_segments = shape.max_segments if task.layout == "packed" else 1
    step = trainer.step(max_segments, placement)
    like = place_rows(_rows(task, Batch([], [])), task.mesh)
    compiled = step.lower(state, like).compile()
    clock = Clock(time.perf_counter() - started)

    pending: list[tuple[jax.Array, int]] = []

    def wait() -> None:
        """Wait for the loss of the step that was sent last, unless it has arrived."""
        if pending:
            losses.append(clock.arrived(*pending.pop()))
            on_step(losses[-1], clock.rate, len(losses))

    for index, batch in enumerate(stream, first):
        rows = place_rows(_rows(task, batch), task.mesh)
        state, loss = compiled(state, rows)
        wait()  # for the loss of the step before, while the device computes this one
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


def _initial(trainer: Trainer, task: Task) -> tuple[State, State]:
    """The state before the first step, sharded, and the sharding of each array."""

    def make() -> State:
        return trainer.initial(task.size.config, task.seed)

    placement = state_placement(jax.eval_shape(make), task.size.config, task.mesh)
    return jax.jit(make, out_shardings=placement)(), placement


def _rows(task: Task, batch: Batch) -> Rows:
    return (packed if task.layout == "packed" else padded)(batch, task.size.shape)


def _same_run(path: Path, facts: dict[str, Any]) -> list[float]:
    """The losses in a checkpoint.

    Raises:
      ValueError: the checkpoint is of a run with other facts.
    """
    found = checkpoint.read_facts(path)
    losses = found.pop("losses")
    if differing := _differing(facts, found):
        raise ValueError(f"{path}: expected a run with {differing}")
    return losses


def _differing(wanted: dict[str, Any], found: dict[str, Any], inside: str = "") -> str:
    """The first fact that differs, with both values; empty if all are the same."""
    for name, value in wanted.items():
        got = found.get(name)
        if isinstance(value, dict) and isinstance(got, dict):
            if deeper := _differing(value, got, f"{inside}{name} "):
                return deeper
        elif got != value:
            return f"{inside}{name} {value}, got {got}"
    return ""
