"""Runs our attention in each installed framework on a mesh of eight CPU devices.

For each framework it prints the error and the number of parts of the result.
tests/integrations/test_frameworks.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.integration_layers import LAYERS, MASK, X


def main() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = {}
    for name, layer in LAYERS.items():
        if importlib.util.find_spec(layer.package) is None:
            continue
        params, original, ours = layer.make()
        expected = jax.jit(original)(params, X, MASK)
        params = jax.device_put(params, NamedSharding(mesh, P()))
        arrays = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (X, MASK)]
        out = jax.jit(ours)(params, *arrays)
        error = float(abs(np.asarray(out) - np.asarray(expected)).max())
        found[name] = error, len({x.index[0].start for x in out.addressable_shards})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
