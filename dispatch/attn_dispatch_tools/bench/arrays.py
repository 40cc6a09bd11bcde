"""The arrays of a cell, with the same numbers in every layout that packages take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.mask_shares import group_ends

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""query, key, value and the gradient of the output."""

BATCH, ROWS, ROW, PADDED = "batch", "rows", "row", "padded"
"""The layouts. BATCH: [B, T, N, H]. ROWS: packed sequences, [rows, N, H]. ROW: the same with one
more axis, [1, rows, N, H]. PADDED: a sequence in each batch row, and zeros up to `Cell.longest`."""


class CellArrays:
    """The arrays of a cell, each made when it is first used and then kept."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self._made: dict[str, Inputs] = {}

    def inputs(self, layout: str) -> Inputs:
        """query, key, value and out_grad, normally distributed, in bfloat16."""
        if layout not in self._made:
            self._made[layout] = self._laid_out(layout)
        return self._made[layout]

    @cached_property
    def cu_seqlens(self) -> jax.Array:
        """The prefix sums of the documents' lengths, int32 [documents + 1]."""
        return jnp.asarray(np.cumsum((0, *self.cell.lengths)), jnp.int32)

    @cached_property
    def segment_ids(self) -> jax.Array:
        """The document of each row, counted from 1, int32 [1, rows]."""
        ids = np.repeat(np.arange(len(self.cell.lengths)) + 1, self.cell.lengths)
        return jnp.asarray(ids, jnp.int32)[None]

    @cached_property
    def lengths(self) -> jax.Array:
        """The documents' lengths, int32 [documents]."""
        return jnp.asarray(self.cell.lengths, jnp.int32)

    @cached_property
    def mask_groups(self) -> jax.Array:
        """For a cell with a mask: the document or the image of each position, int32 [rows]."""
        assert self.cell.mask is not None
        return jnp.asarray(self.cell.mask.groups(self.cell.seq_len), jnp.int32)

    @cached_property
    def mask_ends(self) -> tuple[jax.Array, jax.Array]:
        """For a cell with a mask: the first key of each query's image and its end, int32 [rows]."""
        assert self.cell.mask is not None
        first, end = group_ends(self.cell.mask, self.cell.seq_len)
        return jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32)

    @cached_property
    def dense_mask(self) -> jax.Array:
        """For a cell with a mask: all of its pairs, bool [1, 1, rows, rows]."""
        assert self.cell.mask is not None
        t = jnp.arange(self.cell.seq_len, dtype=jnp.int32)
        return jax.jit(self.cell.mask.function())(t[:, None], t[None], self.mask_groups)[None, None]

    def without_padding(self, results: Sequence[jax.Array], layout: str) -> list[jax.Array]:
        """Results as [rows, heads, dim], in the order that all layouts share."""
        flat = [x.reshape(-1, *x.shape[-2:]) for x in results]
        return [x[self._places] for x in flat] if layout == PADDED else flat

    @cached_property
    def _places(self) -> np.ndarray:
        """The index of each row in the padded batch."""
        starts = np.arange(len(self.cell.lengths)) * self.cell.longest
        return np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, self.cell.lengths, strict=True)]
        )

    def _laid_out(self, layout: str) -> Inputs:
        cell = self.cell
        if layout == ROW:
            q, k, v, out_grad = (x[None] for x in self.inputs(ROWS))
            return q, k, v, out_grad
        if layout == PADDED:
            q, k, v, out_grad = (self._padded(x) for x in self.inputs(ROWS))
            return q, k, v, out_grad
        leading = (cell.seq_len,) if layout == ROWS else (cell.batch, cell.seq_len)
        heads = (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads, cell.num_heads)
        dims = (cell.head_dim, cell.head_dim, cell.head_dim_v, cell.head_dim_v)
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, out_grad = (
            jax.random.normal(key, (*leading, n, dim), jnp.bfloat16)
            for key, n, dim in zip(keys, heads, dims, strict=True)
        )
        return q, k, v, out_grad

    def _padded(self, x: jax.Array) -> jax.Array:
        documents, longest = len(self.cell.lengths), self.cell.longest
        zeros = jnp.zeros((documents * longest, *x.shape[1:]), x.dtype)
        return zeros.at[self._places].set(x).reshape(documents, longest, *x.shape[1:])
