"""The kernel of a call's forward-mode derivative for sm90, for any number of shared heads.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32
from fa4_jax.cute import flash_jvp
from fa4_jax.cute.cute_dsl_utils import assume_tensor_aligned
from fa4_jax.cute.flash_jvp import FlashAttentionJvpSm80

_TILE_M, _TILE_N, _THREADS = 64, 64, 128


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


flash_jvp.assume_tensor_aligned = _assume_aligned


def tangent(dtype, head_dim, head_dim_v, is_causal):
    """The kernel as a function. A causal call has as many queries as keys."""
    run = FlashAttentionJvpSm80(
        dtype, head_dim, head_dim_v, 1, is_causal=is_causal, is_local=False, tile_m=_TILE_M,
        tile_n=_TILE_N, num_threads=_THREADS,
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
        scale: Float32,
        stream: cuda.CUstream,
    ):
        heads = q.shape[2]
        k, v = _for_each_query_head(k, heads), _for_each_query_head(v, heads)
        k_tangent = _for_each_query_head(k_tangent, heads)
        v_tangent = _for_each_query_head(v_tangent, heads)
        run(
            q, k, v, q_tangent, k_tangent, v_tangent, out, lse, out_tangent, lse_tangent, scale,
            stream=stream,
        )  # fmt: skip

    return call
