"""`attn_dispatch.sequence`"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import sequence

X = np.zeros((2, 24))
IDS = np.array([[1] * 8 + [2] * 16, [1] * 8 + [2] * 8 + [0] * 8])
DOCUMENTS = sequence.balance(IDS, 4)


def on_devices(count: int) -> Any:
    """The positions of 4 parts, on `count` devices."""
    positions = jax.vmap(lambda _: sequence.positions(24, 4, axis_name="cp"), axis_name="cp")
    return positions(jnp.zeros(count))


ROWS = """
# reorder, restore, positions
sequence.reorder(X, 5)
sequence.restore(X, 24)
sequence.positions(9, 2, order="contiguous")
sequence.reorder(X, 4, order="stripes")
sequence.reorder(X, 0)
sequence.reorder(X, 2, axis=2)
sequence.reorder(X, 2, order=DOCUMENTS)
sequence.reorder(X.T, 4, order=DOCUMENTS, axis=0)
sequence.reorder(X[:1], 4, order=DOCUMENTS)
on_devices(3)

# balance
sequence.balance([1] * 4 + [7] * 6, 2)
sequence.balance([1] * 4 + [0], 2)
sequence.balance([1] * 4, 0)
sequence.balance([1] * 4 + [-3] * 4, 2)
sequence.balance(np.ones((1, 1, 4), int), 2)
sequence.balance(np.ones(4), 2)
sequence.balance(np.ones(0, int), 2)
jax.jit(lambda ids: sequence.balance(ids, 2).tokens)(np.ones(16, int))
"""
