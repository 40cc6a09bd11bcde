"""Compiles the kernels of one set for head dims beyond 256: export_wide_kernels.py FOLDER SET HOST.

Arguments and results are those of export_kernels.py. These kernels are of the package ffpa-attn,
and read no mask: every query sees every key, or a call is causal from the bottom right. The head
dim is known as a kernel is launched; columns up to the set's are computed as 0 and not stored.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # not there with python -I
import exporting

FOLDER, GIVEN, HOST = exporting.arguments()

# The DSL looks for PyTorch too, and must not find the stand-in.
import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch_names  # noqa: E402
import tvm_ffi  # noqa: E402, F401
from cutlass import Float32  # noqa: E402
from exporting import VECTOR, tensor  # noqa: E402

torch_names.install()
for _package in ("ffpa_attn", "ffpa_attn.cute", "quack"):
    exporting.hide_package_code(_package)

import quack.dsl  # noqa: E402, F401
from ffpa_attn.cute import (  # noqa: E402
    _dkdv_d384_sm90,
    _dkdv_d512_sm90,
    _dq_d384_sm90,
    _dq_d512_sm90,
)
from ffpa_attn.cute._dkdv_d384_sm90 import FFPAAttnBwdDKDVSm90SplitDD384  # noqa: E402
from ffpa_attn.cute._dkdv_generic_sm90 import FFPAAttnBwdDKDVSm90SplitDGeneric  # noqa: E402
from ffpa_attn.cute._dq_d384_sm90 import FFPAAttnBwdDQSm90SplitDD384  # noqa: E402
from ffpa_attn.cute._dq_generic_sm90 import FFPAAttnBwdDQSm90SplitDGeneric  # noqa: E402
from ffpa_attn.cute._fwd_d384_sm90 import FFPAAttnFwdSm90SplitDD384Aware  # noqa: E402
from ffpa_attn.cute._fwd_generic_sm90 import FFPAAttnFwdSm90SplitDGeneric  # noqa: E402
from ffpa_attn.cute.utils.named_barrier import NamedBarrierFwd  # noqa: E402

BATCH, ROWS, KEYS, HEADS, KV_HEADS = (cute.sym_int() for _ in range(5))
HEAD_DIM = cute.sym_int(divisibility=8)
PADDED_ROWS = cute.sym_int(divisibility=4)

_NUMBER = 4


class SharedHeads(int):
    """The number of query heads for each key head: above 1 as a kernel is compiled, and known as
    it is launched."""

    at_run_time = None


def _divisor(number):
    return cute.FastDivmodDivisorV2(number.at_run_time)


for _module in (_dkdv_d384_sm90, _dkdv_d512_sm90, _dq_d384_sm90, _dq_d512_sm90):
    _module.FastDivmodDivisor = _divisor


def _with_shared_heads(method, count):
    """A kernel's method with the number of shared heads that `count` reads from its arguments."""

    def called(self, *arguments):
        compiled = self.qhead_per_kvhead
        self.qhead_per_kvhead = count(arguments)
        try:
            return method(self, *arguments)
        finally:
            self.qhead_per_kvhead = compiled

    return called


def _by_shapes(arguments):
    query, key = arguments[:2]  # [rows, head dim, heads, batch]
    return query.shape[2] // key.shape[2]


def _by_divisor(arguments):
    return arguments[-1].divisor


_ONE_GROUP, _BOTH_GROUPS = 128, 256
_TILE_IS_WRITTEN = (NamedBarrierFwd.WarpSchedulerWG1, NamedBarrierFwd.WarpSchedulerWG2)
_SCALES_ARE_READ = NamedBarrierFwd.QueryEmpty
"""Barriers that the forward kernels of ffpa-attn 0.2.4 lack. They use these numbers for nothing."""


@contextmanager
def _replaced(name, call):
    """While a method is traced, call(original, ...) in the place of cute.arch's function."""
    original = getattr(cute.arch, name)
    setattr(cute.arch, name, functools.partial(call, original))
    try:
        yield
    finally:
        setattr(cute.arch, name, original)


def _with_written_tiles(method):
    """The end of the forward pass, in which a group's first warp stores a tile of out from shared
    memory. It must wait for the other warps of the group, which write the rest of the tile."""

    def called(self, *arguments, wg_idx, **named):
        def fence(original):
            original()
            cute.arch.barrier(
                barrier_id=int(_TILE_IS_WRITTEN[wg_idx]), number_of_threads=_ONE_GROUP
            )

        with _replaced("fence_view_async_shared", fence):
            return method(self, *arguments, wg_idx=wg_idx, **named)

    return called


def _with_read_scales(method, awaited, before):
    """The products of a group, which calls before(barrier) where it comes to the barrier `awaited`.

    The first group writes its last scales where the second has read those before them. The barrier
    for that has an arrival from the start, and does not wait.
    """

    def called(self, *arguments):
        def barrier(original, *, barrier_id, number_of_threads):
            if barrier_id == int(awaited):
                before(original)
            original(barrier_id=barrier_id, number_of_threads=number_of_threads)

        with _replaced("barrier", barrier):
            return method(self, *arguments)

    return called


def _wait_for_readers(barrier):
    barrier(barrier_id=int(_SCALES_ARE_READ), number_of_threads=_BOTH_GROUPS)


def _tell_writers(_):
    cute.arch.barrier_arrive(barrier_id=int(_SCALES_ARE_READ), number_of_threads=_BOTH_GROUPS)


def _forward_class(base):
    methods = {
        "producer": _with_shared_heads(base.producer, _by_shapes),
        "mma_wg1": _with_read_scales(base.mma_wg1, NamedBarrierFwd.PEmpty, _wait_for_readers),
        "mma_wg2": _with_read_scales(base.mma_wg2, NamedBarrierFwd.PFull, _tell_writers),
        "epilogue_wg": _with_written_tiles(base.epilogue_wg),
    }
    return type("Forward", (base,), methods)


def _key_grads_class(base):
    names = ("load", "mma_wg1", "mma_wg2")
    methods = {x: _with_shared_heads(getattr(base, x), _by_divisor) for x in names}
    return type("KeyGrads", (base,), methods)


_CLASSES = {
    384: (
        _forward_class(FFPAAttnFwdSm90SplitDD384Aware),
        _key_grads_class(FFPAAttnBwdDKDVSm90SplitDD384),
        FFPAAttnBwdDQSm90SplitDD384,
    ),
    512: (
        _forward_class(FFPAAttnFwdSm90SplitDGeneric),
        _key_grads_class(FFPAAttnBwdDKDVSm90SplitDGeneric),
        FFPAAttnBwdDQSm90SplitDGeneric,
    ),
}
"""For each width of a set, the kernels of the forward pass, of dk and dv, and of dq."""


class Set:
    """The kernels of one set, each as a function and its symbolic arguments."""

    def __init__(self, given: dict) -> None:
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[given["dtype"]]
        self.classes = _CLASSES[given["head_dim"]]
        # The kernels check where a head dim ends that is narrower than the set's.
        self.head_dim = given["head_dim"] - 8
        self.forward_tiles, self.backward_tiles = given["forward"], given["backward"]

    def _heads(self, length, heads):
        return tensor(self.dtype, (BATCH, length, heads, HEAD_DIM), VECTOR)

    def _query(self):
        return self._heads(ROWS, HEADS)

    def _key(self):
        return self._heads(KEYS, KV_HEADS)

    @staticmethod
    def _lse():
        return tensor(Float32, (BATCH, HEADS, ROWS), _NUMBER)

    @staticmethod
    def _row_numbers():
        return tensor(Float32, (BATCH, HEADS, PADDED_ROWS), VECTOR)

    def wide_forward(self):
        return self._forward(is_causal=False)

    def wide_forward_causal(self):
        return self._forward(is_causal=True)

    def _forward(self, *, is_causal):
        run = self.classes[0](
            self.dtype,
            self.head_dim,
            self.head_dim,
            SharedHeads(2),
            is_causal=is_causal,
            pack_gqa=False,
            tile_m=self.forward_tiles["tile_m"],
            tile_n=self.forward_tiles["tile_n"],
        )

        @cute.jit
        def forward(
            q: cute.Tensor,
            k: cute.Tensor,
            v: cute.Tensor,
            out: cute.Tensor,
            lse: cute.Tensor,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            run(q, k, v, out, lse, scale, None, None, None, None, None, stream=stream)

        return forward, (self._query(), self._key(), self._key(), self._query(), self._lse())

    def wide_key_grads(self):
        return self._key_grads(is_causal=False)

    def wide_key_grads_causal(self):
        return self._key_grads(is_causal=True)

    def _key_grads(self, *, is_causal):
        run = self._backward_kernel(self.classes[1], is_causal)

        @cute.jit
        def key_grads(
            q: cute.Tensor,
            k: cute.Tensor,
            v: cute.Tensor,
            out_grad: cute.Tensor,
            lse2: cute.Tensor,
            products: cute.Tensor,
            key_grad: cute.Tensor,
            value_grad: cute.Tensor,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            run.qhead_per_kvhead.at_run_time = q.shape[2] // k.shape[2]
            run(
                q, k, v, out_grad, lse2, products, key_grad, value_grad, scale, None, None,
                stream=stream,
            )  # fmt: skip

        return key_grads, (*self._backward_arrays(), self._key(), self._key())

    def wide_query_grad(self):
        return self._query_grad(is_causal=False)

    def wide_query_grad_causal(self):
        return self._query_grad(is_causal=True)

    def _query_grad(self, *, is_causal):
        run = self._backward_kernel(self.classes[2], is_causal)

        @cute.jit
        def query_grad(
            q: cute.Tensor,
            k: cute.Tensor,
            v: cute.Tensor,
            out_grad: cute.Tensor,
            lse2: cute.Tensor,
            products: cute.Tensor,
            query_grad: cute.Tensor,
            scale: Float32,
            stream: cuda.CUstream,
        ):
            run.qhead_per_kvhead.at_run_time = q.shape[2] // k.shape[2]
            run(q, k, v, out_grad, lse2, products, query_grad, scale, None, None, stream=stream)

        return query_grad, (*self._backward_arrays(), self._query())

    def _backward_arrays(self):
        numbers = self._row_numbers()
        return self._query(), self._key(), self._key(), self._query(), numbers, numbers

    def _backward_kernel(self, kernel_class, is_causal):
        return kernel_class(
            self.dtype,
            self.head_dim,
            self.head_dim,
            is_causal=is_causal,
            qhead_per_kvhead=SharedHeads(2),
            tile_m=self.backward_tiles["tile_m"],
            tile_n=self.backward_tiles["tile_n"],
        )


if __name__ == "__main__":
    exporting.export(Set(GIVEN), FOLDER, GIVEN, HOST)
