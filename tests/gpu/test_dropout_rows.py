"""The entries of a dropout mask that cuDNN decides by one random number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch

DRAWS, ROWS, KEYS = 500, 32, 32


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_at_most_four_rows_share_a_random_number(head_dim, record):
    q, k = (jnp.zeros((2, length, 2, head_dim), jnp.bfloat16) for length in (ROWS, KEYS))

    @jax.jit
    def mask(key):
        options = {"dropout_rate": 0.5, "dropout_key": key, "implementation": "cudnn"}
        return attn_dispatch.dropout_mask(q, k, k, **options)

    keys = jax.random.split(jax.random.key(1), DRAWS)
    kept = np.stack([np.asarray(mask(key)) for key in keys]).reshape(DRAWS, -1)
    signs = np.where(kept, 1.0, -1.0)
    correlated = np.abs(signs.T @ signs) / DRAWS > 0.5
    first, second = (np.unravel_index(x, (2, 2, ROWS, KEYS)) for x in np.nonzero(correlated))
    elsewhere = sum((first[axis] != second[axis]).sum() for axis in (0, 1, 3))
    distances = np.abs(first[2] - second[2])
    record(
        head_dim=head_dim,
        draws=DRAWS,
        most_rows_together=int(correlated.sum(0).max()),
        rows_apart=sorted({int(x) for x in distances}),
        share_dropped=float(1 - kept.mean()),
    )
    assert elsewhere == 0
    assert set(distances) <= {0, 2, 4, 6}
    assert correlated.sum(0).max() <= 4
    assert abs(kept.mean() - 0.5) < 7 * 0.5 / np.sqrt(kept.size / 4)
