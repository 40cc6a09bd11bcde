"""Shardings on a mesh of (data, context, model): rows of the batch along data, their tokens along
context, heads and hidden units along model.

The first matrix of each pair is split by columns and the second by rows, so that a layer sums twice
over "model": after the attention and after the feed-forward part. The attention itself needs no
communication over "data" and "model" (docs/meshes.md). Over "context" it exchanges heads or keys,
and no other layer looks at two tokens (docs/context.md).
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .model import Config
from .packing import Rows

_BY_COLUMNS = ("q", "gate", "up")
_BY_COLUMNS_IF_KV_HEADS_DIVIDE = ("k", "v")
_BY_ROWS = ("o", "down")


def make_mesh(data: int, model: int, context: int = 1) -> Mesh:
    """A mesh of data · context · model devices.

    Raises:
      ValueError: there are fewer devices.
    """
    devices = np.asarray(jax.devices())
    shape = (data, context, model)
    if (count := data * context * model) > devices.size:
        raise ValueError(
            f"mesh: expected at most {devices.size} devices, got {'x'.join(map(str, shape))}"
        )
    auto = (AxisType.Auto,) * 3
    return Mesh(devices[:count].reshape(shape), ("data", "context", "model"), axis_types=auto)


def state_placement(state: Any, config: Config, mesh: Mesh) -> Any:
    """A sharding for each array of `state`. Adam's averages are sharded like their parameters."""
    model = mesh.shape["model"]
    for name in ("heads", "ffn_width"):
        if getattr(config, name) % model:
            raise ValueError(
                f"mesh: expected {name} {getattr(config, name)} to be a multiple of the model "
                f"axis, got {model}"
            )

    def sharding_of(path: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec({getattr(x, "key", None) for x in path}, config, model))

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _spec(names: set[Any], config: Config, model: int) -> P:
    """How to split an array [layers, inputs, outputs]; `names` are the keys that lead to it."""
    columns = _BY_COLUMNS
    if config.kv_heads % model == 0:
        columns += _BY_COLUMNS_IF_KV_HEADS_DIVIDE
    if names & {*columns}:
        return P(None, None, "model")
    if names & {*_BY_ROWS}:
        return P(None, "model", None)
    return P()


def place_rows(rows: Rows, mesh: Mesh) -> Rows:
    """The rows, split along the mesh axis "data", and their tokens along "context"."""
    named = (("rows", "data"), ("tokens in a row", "context"))
    for size, (what, axis) in zip(rows.tokens.shape, named, strict=True):
        if size % mesh.shape[axis]:
            raise ValueError(
                f"mesh: expected {size} {what} to be a multiple of the {axis} axis, got "
                f"{mesh.shape[axis]}"
            )
    return jax.device_put(rows, NamedSharding(mesh, P("data", "context")))
