"""The kernel of a call's forward-mode derivative for sm90, for any mask and number of shared heads.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this. The package's
kernel computes every tile of keys in a range. Here the range counts the entries of a tile's lists,
those of tiles seen in part and then those of tiles seen in full, and whatever takes a number from
the range looks up the tile.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from fa4_jax.cute import flash_jvp
from fa4_jax.cute.block_sparsity import BlockSparseTensors
from fa4_jax.cute.cute_dsl_utils import assume_tensor_aligned
from fa4_jax.cute.flash_jvp import FlashAttentionJvpSm80
from fa4_jax.cute.tile_scheduler import SingleTileLPTScheduler
from fa4_jax.cute.utils import AuxData
from tile_order import LastRowsFirst

_THREADS = 128


@cute.jit
def _for_each_query_head(x, heads):
    """A view of keys or values [B, S, K, H] with as many heads as the query.

    The kernel itself divides by a constant number of shared heads, which is 1 for this.
    """
    x = assume_tensor_aligned(x)
    batch, length, kv_heads, width = x.shape
    by_batch, by_row, by_head, by_column = x.stride
    shape = (batch, length, (heads // kv_heads, kv_heads), width)
    return cute.make_tensor(
        x.iterator, cute.make_layout(shape, stride=(by_batch, by_row, (0, by_head), by_column))
    )


def _assume_aligned(x):
    """The tensor with strides that are multiples of vectors; those of the views above are so."""
    is_view = any(isinstance(stride, tuple) for stride in x.stride)
    return x if is_view else assume_tensor_aligned(x)


class _Work(NamedTuple):
    """What the kernel gets as the parameters of its scheduler."""

    order: SingleTileLPTScheduler.Params
    lists: BlockSparseTensors


class _Scheduler:
    """The order of tiles (tile_order.py), and the way of lists into the kernel."""

    given: tuple
    """Lists and the number of keys, of the kernel being traced; then what it gets."""

    @staticmethod
    def to_underlying_arguments(args):
        lists, keys = _Scheduler.given
        args = dataclasses.replace(args, seqlen_k=keys)
        return _Work(LastRowsFirst.to_underlying_arguments(args), lists)

    @staticmethod
    def get_grid_shape(work):
        return SingleTileLPTScheduler.get_grid_shape(work.order)

    @staticmethod
    def create(work):
        _Scheduler.given = work
        return SingleTileLPTScheduler.create(work.order)


class _Listed:
    """The lists of a thread block's tile of queries, in place of the package's BlockInfo: the
    range of tiles counts their entries, partial ones first."""

    latest: _Listed
    """The instance of the kernel that is being traced."""

    def __init__(self, tile_m, tile_n, *rest, **named):
        order, lists = _Scheduler.given
        place = SingleTileLPTScheduler.create(order).initial_work_tile_info().tile_idx
        block, head, batch, _ = place
        counts, indices, full_counts, full_indices = lists[:4]
        self._partial_count = counts[batch, head, block]
        self._count = self._partial_count + full_counts[batch, head, block]
        self._partial = indices[batch, head, block, None]
        self._full = full_indices[batch, head, block, None]
        self._tile_n, self._keys = tile_n, None
        _Listed.latest = self

    def get_n_block_min_max(self, seqlen, m_block):
        self._keys = seqlen.seqlen_k
        return 0, self._count

    @cute.jit
    def tile(self, entry):
        """The entry's tile of keys; 0 where the lists are empty."""
        found = Int32(0)
        if entry < self._partial_count:
            found = self._partial[entry]
        if (entry >= self._partial_count) & (entry < self._count):
            found = self._full[entry - self._partial_count]
        return found

    @cute.jit
    def hide(self, mask, scores, entry):
        """Applies the mask unless every pair is seen. A tile that reaches past the last key has
        pairs that no list knows of."""
        tile = self.tile(entry)
        is_listed = (entry >= self._partial_count) & (entry < self._count)
        if not (is_listed & ((tile + 1) * self._tile_n <= self._keys)):
            mask(scores, n_block=tile)


class _Tangent(FlashAttentionJvpSm80):
    """The package's kernel, with entries of lists for tiles of keys."""

    def load_K(self, *arrays, **named):
        _load(FlashAttentionJvpSm80.load_K, self, *arrays, **named)

    def load_V(self, *arrays, **named):
        _load(FlashAttentionJvpSm80.load_V, self, *arrays, **named)

    def compute_one_n_block(self, entry, *, mask_fn, **named):
        hide = partial(_Listed.latest.hide, mask_fn)
        FlashAttentionJvpSm80.compute_one_n_block(
            self, entry, mask_fn=lambda scores, n_block: hide(scores, n_block), **named
        )


def _load(load, kernel, *arrays_and_entry, need_predicates, **named):
    """Any entry may be the last tile, which may be smaller."""
    *arrays, entry = arrays_and_entry
    load(kernel, *arrays, _Listed.latest.tile(entry), need_predicates=True, **named)


flash_jvp.assume_tensor_aligned = _assume_aligned
flash_jvp.BlockInfo, flash_jvp.SingleTileScheduler = _Listed, _Scheduler


def tangent(dtype, head_dim, head_dim_v, tiles, mask):
    """The kernel as a function, for masks of one form (mask_forms.py)."""
    run = _Tangent(
        dtype, head_dim, head_dim_v, 1, is_causal=False, is_local=False, tile_m=tiles["tile_m"],
        tile_n=tiles["tile_n"], num_threads=_THREADS, mask_mod=mask, has_aux_tensors=True,
    )  # fmt: skip

    @cute.jit
    def call(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        q_tangent: cute.Tensor,
        k_tangent: cute.Tensor,
        v_tangent: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_tangent: cute.Tensor,
        lse_tangent: cute.Tensor,
        partial_counts: cute.Tensor,
        partial_indices: cute.Tensor,
        full_counts: cute.Tensor,
        full_indices: cute.Tensor,
        mask_data: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        heads = q.shape[2]
        k, v = _for_each_query_head(k, heads), _for_each_query_head(v, heads)
        k_tangent = _for_each_query_head(k_tangent, heads)
        v_tangent = _for_each_query_head(v_tangent, heads)
        lists = BlockSparseTensors(partial_counts, partial_indices, full_counts, full_indices)
        _Scheduler.given = lists, k.shape[1]
        run(
            q, k, v, q_tangent, k_tangent, v_tangent, out, lse, out_tangent, lse_tangent, scale,
            aux_data=AuxData(tensors=[mask_data]), stream=stream,
        )  # fmt: skip

    return call
