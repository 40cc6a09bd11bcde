"""Prints what eight devices exchange to reorder, for each order and kind of mesh axes, as JSON.

By kind, order and function: whether results and gradients are those of one device, whether they
are sharded like the argument, and the collectives of the program.
"""

from __future__ import annotations

import json
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attn_dispatch import sequence

X, WEIGHTS = np.random.default_rng(0).standard_normal((2, 2, 64, 4), np.float32)
IDS = np.repeat(np.arange(1, 5), 16)
ORDERS = {"zigzag": "zigzag", "contiguous": "contiguous", "documents": sequence.balance(IDS, 8)}
_COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute)\(")


def facts(there, back, order, sharding: NamedSharding) -> dict[str, object]:
    """The facts of one function, there, with its inverse, back."""
    x, weights = (jax.device_put(y, sharding) for y in (X, WEIGHTS))

    def function(x):
        return there(x, 8, order=order)

    jitted = jax.jit(function)
    gradient = jax.jit(jax.grad(lambda x, y: (function(x) * y).sum()))(x, weights)
    results = jitted(x), gradient
    expected = there(X, 8, order=order), back(WEIGHTS, 8, order=order)
    text = jitted.lower(x).compile().as_text()
    assert text is not None
    return {
        "is_right": all(map(np.array_equal, results, expected))
        and np.array_equal(function(x), expected[0]),
        "is_sharded": all(y.sharding.is_equivalent_to(sharding, 3) for y in results),
        "collectives": sorted(set(_COLLECTIVE.findall(text))),
    }


def main() -> None:
    found = {}
    functions = sequence.reorder, sequence.restore
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("cp",), axis_types=(kind,))
        sharding = NamedSharding(mesh, PartitionSpec(None, "cp"))
        with jax.set_mesh(mesh):
            for name, order in ORDERS.items():
                for there, back in (functions, functions[::-1]):
                    key = f"{kind.name} {name} {there.__name__}"
                    found[key] = facts(there, back, order, sharding)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
