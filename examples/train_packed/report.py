"""The output of a run: a progress bar, a table, a plot and a JSON file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from attn_dispatch import explain
from attn_dispatch_tools.reports.environment import environment, file_name

from ..screen import console
from .training import Done, Task, train


def trained(task: Task, resume: bool) -> Done:
    """Train, and show a progress bar."""
    columns = (
        TextColumn(task.layout), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.description}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("compiling", total=task.size.steps)

        def on_step(loss: float, rate: float, done: int) -> None:
            shown = f"loss {loss:.3f}"
            if rate == rate:  # not NaN
                shown += f"  {rate:,.0f} tokens/s"
            progress.update(bar, completed=done, description=shown)

        return train(task, resume=resume, on_step=on_step)


def attention(task: Task) -> str:
    """The implementations that compute the attention of one device, forward and backward."""
    c, shape = task.size.config, task.size.shape
    is_packed = task.layout == "packed"
    rows = shape.rows if is_packed else shape.max_documents
    q, k = (
        jax.ShapeDtypeStruct((rows, shape.row_length, heads, c.head_dim), c.dtype)
        for heads in (c.heads, c.kv_heads)
    )
    ids = jax.ShapeDtypeStruct(q.shape[:2], "int32")
    plan = explain(
        q, k, k, is_causal=True, query_segment_ids=ids,
        max_segments=shape.max_segments if is_packed else 1,
    )  # fmt: skip
    return f"{plan.chosen_forward}, {plan.chosen_backward}"


def report(done: Mapping[str, Done], facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Print a table, write train_packed.png and a JSON file, and return what is in the latter."""
    table = Table("", "filled", "real tokens/s", "step", "first loss", "last loss", "compiled in")
    for layout, x in done.items():
        if not x.compile_seconds:
            console.print(f"{layout}: all {len(x.losses)} steps were done before")
            continue
        table.add_row(
            layout, f"{x.fill:.0%}", f"{x.tokens_per_second:,.0f}",
            f"{1e3 * x.step_seconds:,.1f} ms", f"{x.losses[0]:.4f}",
            f"{x.losses[-1]:.4f}", f"{x.compile_seconds:.1f} s",
        )  # fmt: skip
    if table.row_count:
        console.print(table)
    data: dict[str, Any] = {"environment": environment(), **facts}
    data["runs"] = {layout: dataclasses.asdict(x) for layout, x in done.items()}
    if len(done) == 2:
        data["ratio"] = done["packed"].tokens_per_second / done["padded"].tokens_per_second
        gaps = np.abs(np.subtract(done["packed"].losses, done["padded"].losses))
        data["largest_loss_gap"], data["mean_loss_gap"] = float(gaps.max()), float(gaps.mean())
        console.print(
            f"packed is {data['ratio']:.2f} times as fast; losses of the same step differ by "
            f"{gaps.max():.4f} at most, {gaps.mean():.4f} on average"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _plot({layout: x.losses for layout, x in done.items()}, folder / "train_packed.png")
    path = folder / f"{file_name('train_packed', data['environment'])}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    console.print(path)
    return data


def _plot(curves: dict[str, list[float]], path: Path) -> None:
    try:
        from .plot import plot_losses
    except ImportError as error:
        console.print(f"no plot: {error}")
        return
    plot_losses(curves, path)
    console.print(path)
