"""The numbers that test_mesh.py compares, as JSON, from a process with eight devices."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .drawn_documents import drawn
from .mesh import make_mesh, place_rows, state_placement
from .model import Config
from .packing import Rows, Shape, batches, packed, padded
from .sizes import SIZES
from .step import Trainer
from .training import Task, train

CONFIG = Config(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48, vocabulary=256
)  # fmt: skip
SHAPE = Shape(rows=4, row_length=48, max_segments=8, max_documents=12)
TINY = dataclasses.replace(SIZES["tiny"], config=CONFIG, steps=4)


TRAINER = Trainer.new(CONFIG, 1e-3, TINY.steps)


def gradients(params: Any, rows: Rows, max_segments: int, *sizes: int) -> tuple[Any, Any]:
    """Loss and gradients as NumPy arrays, and the parameters, on a mesh of these sizes."""
    mesh = make_mesh(*sizes)
    params = jax.device_put(params, state_placement(params, CONFIG, mesh))
    found = jax.jit(jax.value_and_grad(TRAINER.loss), static_argnums=2)(
        params, place_rows(rows, mesh), max_segments
    )
    return jax.tree.map(np.asarray, found), params


def gap(one: Any, other: Any) -> float:
    """The largest difference, as a share of the array's largest number."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def refusal(*sizes: int) -> str:
    """The error of training on a mesh of this shape; "none" if there is none."""
    try:
        train(Task(TINY, make_mesh(*sizes)))
    except ValueError as error:
        return str(error)
    return "none"


def main(folder: Path) -> dict[str, Any]:
    batch = next(batches(drawn(31), SHAPE, 0))
    layouts = {
        "packed": (packed(batch, SHAPE), SHAPE.max_segments), "padded": (padded(batch, SHAPE), 1)
    }  # fmt: skip
    params = TRAINER.initial(CONFIG, 0).params
    expected, _ = gradients(params, *layouts["packed"], 1, 1)
    gaps, placed = {}, {}
    for name, *sizes in (
        ("padded", 1, 1), ("packed", 2, 1), ("packed", 2, 4), ("packed", 4, 2), ("padded", 4, 2),
        ("packed", 2, 1, 2), ("packed", 1, 1, 8),  # heads are exchanged; a ring
    ):  # fmt: skip
        mesh = "x".join(map(str, sizes))
        found, placed[mesh] = gradients(params, *layouts[name], *sizes)
        gaps[f"{name} {mesh}"] = gap(found, expected)

    def shard(mesh: str, name: str) -> list[int]:
        kernel = placed[mesh]["layers"][name]["kernel"]
        return list(kernel.sharding.shard_shape(kernel.shape))

    task = Task(TINY, make_mesh(4, 2), checkpoints=folder)
    whole = train(dataclasses.replace(task, checkpoints=None)).losses
    train(task, until=2)
    resumed = train(dataclasses.replace(task, mesh=make_mesh(2, 1)), resume=True).losses
    return {
        "gaps": gaps, "shards": {x: shard("4x2", x) for x in ("q", "k", "o", "down")},
        "k_of_2x4": shard("2x4", "k"), "whole": whole, "resumed": resumed,
        "rows": refusal(8, 1), "heads": refusal(1, 8),
        "tokens": refusal(1, 1, 7),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
