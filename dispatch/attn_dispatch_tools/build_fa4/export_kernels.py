"""Compiles the kernels of one set to object files: export_kernels.py FOLDER SET HOST, with SET as
JSON, and HOST a target of LLVM.

This is a separate program, run in the environment that has CUTLASS's DSL (environment.py). It uses
no GPU. Batch, lengths, numbers of heads, and how many query heads share a key head stay symbolic.

Each kernel becomes FOLDER/KERNEL.o. The file FOLDER/symbols.json, written last, has the symbol of
each kernel's host function.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # not there with python -I
import exporting

FOLDER, GIVEN, HOST = exporting.arguments()
exporting.hide_package_code("fa4_jax")  # its __init__ imports JAX

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import score_functions  # noqa: E402
import sm100_kernels  # noqa: E402
import tangent_kernel  # noqa: E402
import tile_order  # noqa: E402
from cutlass import Float32, Int32, const_expr  # noqa: E402
from exporting import VECTOR, tensor  # noqa: E402
from fa4_jax.cute import flash_bwd_sm90, flash_fwd_sm90  # noqa: E402
from fa4_jax.cute.block_sparsity import BlockSparseTensors  # noqa: E402
from fa4_jax.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess  # noqa: E402
from fa4_jax.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess  # noqa: E402
from fa4_jax.cute.utils import AuxData  # noqa: E402
from forward_kernel import Forward  # noqa: E402
from mask_forms import BITS_FORM, ROWS_FORM  # noqa: E402

BATCH, ROWS, KEYS, HEADS, KV_HEADS = (cute.sym_int() for _ in range(5))
PADDED_ROWS, ROW_SUMS, KEY_SUMS = (cute.sym_int(divisibility=4) for _ in range(3))


def _lists():
    """Tiles of which some, and of which all, pairs are visible: counts and indices of each."""
    lines, partial, full = (cute.sym_int() for _ in range(3))
    counts = tensor(Int32, (BATCH, HEADS, lines), 4)
    return tuple(
        x
        for width in (partial, full)
        for x in (counts, tensor(Int32, (BATCH, HEADS, lines, width), 4))
    )


score_functions.replace_loops(flash_fwd_sm90, flash_bwd_sm90)
tile_order.install()


class SharedHeads(int):
    """The number of query heads for each key head: above 1 as the kernel is compiled, and known as
    it is launched."""

    at_run_time = None


_ConstantDivisor = flash_bwd_sm90.FastDivmodDivisor


def _divisor(number):
    return _ConstantDivisor(number.at_run_time if isinstance(number, SharedHeads) else number)


flash_bwd_sm90.FastDivmodDivisor = _divisor


_NO_VARIANT = {"forward": "", "backward": "", "types": "", "is_small_at_zero": True}


class Set:
    """The kernels of one set, each as a function and its symbolic arguments."""

    def __init__(self, given: dict) -> None:
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[given["dtype"]]
        self.head_dim, self.head_dim_v = given["head_dim"], given["head_dim_v"]
        self.forward_tiles, self.backward_tiles = given["forward"], given["backward"]
        self.tangent_tiles = given["tangent"]
        self.variant = given["variant"] or _NO_VARIANT

    def _heads(self, length, heads, width):
        return tensor(self.dtype, (BATCH, length, heads, width), VECTOR)

    def _query(self):
        return self._heads(ROWS, HEADS, self.head_dim)

    def _out(self):
        return self._heads(ROWS, HEADS, self.head_dim_v)

    def _key(self):
        return self._heads(KEYS, KV_HEADS, self.head_dim)

    def _value(self):
        return self._heads(KEYS, KV_HEADS, self.head_dim_v)

    @staticmethod
    def _lse():
        return tensor(Float32, (BATCH, HEADS, ROWS), 4)

    @staticmethod
    def _sinks():
        return tensor(Float32, (BATCH, HEADS), 4)

    @staticmethod
    def _row_numbers():
        return tensor(Float32, (BATCH, HEADS, PADDED_ROWS), VECTOR)

    @staticmethod
    def _query_sums():
        return tensor(Float32, (BATCH, HEADS, ROW_SUMS), VECTOR)

    @staticmethod
    def _key_sums():
        return tensor(Float32, (BATCH, KV_HEADS, KEY_SUMS), VECTOR)

    def _mod_arrays(self):
        """The arrays that the change of scores reads."""
        kinds = {"f": Float32, "i": Int32}
        return tuple(tensor(kinds[x], (cute.sym_int(),), 4) for x in self.variant["types"])

    def _score_mod(self, *, is_backward=False):
        code = self.variant["forward"]
        only_rows = is_backward and not self.variant["is_small_at_zero"]
        return score_functions.score_mod(code, 1, only_rows=only_rows) if code else None

    def _score_mod_gradient(self):
        code = self.variant["backward"]
        return score_functions.score_mod_gradient(code, 1) if code else None

    def _forward_kernel(self, mask):
        tiles = self.forward_tiles
        return Forward(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            1,
            is_causal=False,
            is_local=False,
            pack_gqa=False,
            tile_m=tiles["tile_m"],
            tile_n=tiles["tile_n"],
            num_stages=2,
            num_threads=(tiles["tile_m"] // 64 + 1) * 128,
            Q_in_regs=False,
            intra_wg_overlap=True,
            mma_pv_is_rs=tiles["weights_in_registers"],
            score_mod=self._score_mod(),
            mask_mod=mask,
            has_aux_tensors=True,
        )

    def forward(self):
        return self._forward(*ROWS_FORM)

    def forward_bits(self):
        return self._forward(*BITS_FORM)

    def forward_sinks(self):
        return self._forward(*ROWS_FORM, sinks=(self._sinks(),))

    def forward_bits_sinks(self):
        return self._forward(*BITS_FORM, sinks=(self._sinks(),))

    def _forward(self, mask, mask_array, sinks=()):
        run = self._forward_kernel(mask)

        @cute.jit
        def forward(
            q: cute.Tensor,
            k: cute.Tensor,
            v: cute.Tensor,
            out: cute.Tensor,
            lse: cute.Tensor,
            partial_counts: cute.Tensor,
            partial_indices: cute.Tensor,
            full_counts: cute.Tensor,
            full_indices: cute.Tensor,
            mask_data: cute.Tensor,
            sinks: tuple,
            mod_arrays: tuple,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            lists = BlockSparseTensors(partial_counts, partial_indices, full_counts, full_indices)
            data = AuxData(tensors=[mask_data, *mod_arrays])
            sink = sinks[0] if const_expr(len(sinks) > 0) else None
            run(
                q, k, v, out, lse, scale, learnable_sink=sink, blocksparse_tensors=lists,
                aux_data=data, stream=stream,
            )  # fmt: skip

        arrays = (self._query(), self._key(), self._value(), self._out(), self._lse())
        mask_data = mask_array(BATCH, HEADS, ROWS)
        return forward, (*arrays, *_lists(), mask_data, sinks, self._mod_arrays())

    def preprocess(self):
        run = FlashAttentionBackwardPreprocess(
            self.dtype, self.head_dim, self.head_dim_v, self.backward_tiles["tile_m"]
        )

        @cute.jit
        def preprocess(
            out: cute.Tensor,
            out_grad: cute.Tensor,
            products: cute.Tensor,
            lse: cute.Tensor,
            lse2: cute.Tensor,
            query_sums: cute.Tensor,
            lse_grad: cute.Tensor,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            run(
                out, out_grad, products, lse, lse2, query_sums, None, None, lse_grad, None, None,
                scale, stream=stream,
            )  # fmt: skip

        numbers = self._row_numbers()
        return preprocess, (
            self._out(), self._out(), numbers, self._lse(), numbers, self._query_sums(), self._lse()
        )  # fmt: skip

    def backward(self):
        """The backward kernel of calls with as many key heads, which writes dk and dv itself."""
        return self._backward(*ROWS_FORM)

    def backward_grouped(self):
        """The backward kernel of grouped heads, which adds to dk and dv in float32."""
        return self._backward_grouped(*ROWS_FORM)

    def backward_bits(self):
        return self._backward(*BITS_FORM)

    def backward_bits_grouped(self):
        return self._backward_grouped(*BITS_FORM)

    def _backward_kernel(self, shared_heads, mask):
        tiles = self.backward_tiles
        return flash_bwd_sm90.FlashAttentionBackwardSm90(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            shared_heads,
            is_causal=False,
            is_local=False,
            deterministic=False,
            tile_m=tiles["tile_m"],
            tile_n=tiles["tile_n"],
            Q_stage=tiles["query_stages"],
            dO_stage=tiles["out_grad_stages"],
            PdS_stage=tiles["score_stages"],
            SdP_swapAB=tiles["scores_transposed"],
            dKV_swapAB=tiles["key_grad_transposed"],
            dQ_swapAB=False,
            AtomLayoutMSdP=1,
            AtomLayoutNdKV=tiles["key_grad_layout"],
            AtomLayoutMdQ=tiles["query_grad_layout"],
            num_threads=384,
            V_in_regs=False,
            score_mod=self._score_mod(is_backward=True),
            score_mod_bwd=self._score_mod_gradient(),
            mask_mod=mask,
            has_aux_tensors=True,
            q_subtile_factor=tiles["subtiles"],
            dQ_single_wg=tiles["query_grad_by_one_group"],
        )

    def _backward(self, *mask):
        return self._backward_of(1, self._key(), self._value(), *mask)

    def _backward_grouped(self, *mask):
        return self._backward_of(SharedHeads(2), self._key_sums(), self._key_sums(), *mask)

    def _backward_of(self, shared_heads, key_grad, value_grad, mask, mask_array):
        run = self._backward_kernel(shared_heads, mask)

        @cute.jit
        def backward(
            q: cute.Tensor,
            k: cute.Tensor,
            v: cute.Tensor,
            out_grad: cute.Tensor,
            lse2: cute.Tensor,
            products: cute.Tensor,
            query_sums: cute.Tensor,
            key_grad: cute.Tensor,
            value_grad: cute.Tensor,
            partial_counts: cute.Tensor,
            partial_indices: cute.Tensor,
            full_counts: cute.Tensor,
            full_indices: cute.Tensor,
            mask_data: cute.Tensor,
            mod_arrays: tuple,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            lists = BlockSparseTensors(partial_counts, partial_indices, full_counts, full_indices)
            data = AuxData(tensors=[mask_data, *mod_arrays])
            if const_expr(isinstance(run.qhead_per_kvhead, SharedHeads)):
                run.qhead_per_kvhead.at_run_time = q.shape[2] // k.shape[2]
            run(
                q, k, v, out_grad, lse2, products, query_sums, key_grad, value_grad, scale,
                aux_data=data, blocksparse_tensors=lists, stream=stream,
            )  # fmt: skip

        numbers = self._row_numbers()
        arrays = (self._query(), self._key(), self._value(), self._out(), numbers, numbers)
        sums = (self._query_sums(), key_grad, value_grad)
        mask_data = mask_array(BATCH, HEADS, ROWS)
        return backward, (*arrays, *sums, *_lists(), mask_data, self._mod_arrays())

    def query_grad(self):
        tiles = self.backward_tiles
        threads = 128 if tiles["query_grad_by_one_group"] else 256
        layout = tiles["query_grad_layout"]
        settings = (90, tiles["tile_m"], threads, layout, False)
        return self._postprocess(settings, self._query_sums(), self._query())

    def key_value_grad(self):
        tiles = self.backward_tiles
        layout, is_transposed = tiles["key_grad_layout"], tiles["key_grad_transposed"]
        settings = (90, tiles["tile_n"], 256, layout, is_transposed)
        return self._postprocess(settings, self._key_sums(), self._key())

    def tangent(self):
        return self._tangent(*ROWS_FORM)

    def tangent_bits(self):
        return self._tangent(*BITS_FORM)

    def _tangent(self, mask, mask_array):
        tiles = self.tangent_tiles
        run = tangent_kernel.tangent(self.dtype, self.head_dim, self.head_dim_v, tiles, mask)
        query, key, value = self._query(), self._key(), self._value()
        given = (query, key, value, query, key, value, self._out(), self._lse())
        mask_data = mask_array(BATCH, HEADS, ROWS)
        return run, (*given, self._out(), self._lse(), *_lists(), mask_data)

    def _postprocess(self, settings, sums, result):
        run = FlashAttentionBackwardPostprocess(self.dtype, self.head_dim, *settings)

        @cute.jit
        def postprocess(
            sums: cute.Tensor, grad: cute.Tensor, scale: Float32, stream: cuda.CUstream
        ):
            run(sums, grad, scale, None, None, None, stream=stream)

        return postprocess, (sums, result)


class Sm100Set(Set):
    """The kernels of one set for sm100: others, which take the same arguments."""

    def _forward_kernel(self, mask):
        return sm100_kernels.forward(self.head_dim, self.head_dim_v, mask)

    def _backward_kernel(self, shared_heads, mask):
        return sm100_kernels.backward(self.head_dim, self.head_dim_v, shared_heads, mask)

    def query_grad(self):
        return self._postprocess(sm100_kernels.SUMS, self._query_sums(), self._query())

    def key_value_grad(self):
        return self._postprocess(sm100_kernels.SUMS, self._key_sums(), self._key())


if __name__ == "__main__":
    kernels = {"sm90": Set, "sm100": Sm100Set}[GIVEN["arch"]](GIVEN)
    exporting.export(kernels, FOLDER, GIVEN, HOST)
