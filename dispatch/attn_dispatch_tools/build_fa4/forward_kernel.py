"""The forward kernel for sm90, for any number of shared heads, and with sinks where asked.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from fa4_jax.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from fa4_jax.cute.quack.layout_utils import reshape_acc_to_mn


@cute.jit
def _take_in(sink, sums, lse):
    """Makes a sink one more key, of value 0, of finished rows: of their sums and of their lse.

    The package's own sinks are for all batch rows, and give rows that see no key an lse.
    """
    columns = reshape_acc_to_mn(sums)
    for r in cutlass.range(cute.size(lse), unroll_full=True):
        without = lse[r]
        difference = sink - without  # infinite where a sink is
        distance = -difference if difference > 0.0 else difference
        smaller = cute.math.exp2(distance * math.log2(math.e), fastmath=True)
        larger = sink if difference > 0.0 else without
        whole = larger + cute.math.log2(1.0 + smaller, fastmath=True) * math.log(2.0)
        share = (smaller if difference > 0.0 else 1.0) * cute.arch.rcp_approx(1.0 + smaller)
        sees_none = without == -Float32.inf
        lse[r] = without if sees_none else whole
        columns[r, None].store(columns[r, None].load() * (0.0 if sees_none else share))


class Forward(FlashAttentionForwardSm90):
    """The kernel, with the number of query heads for each key head taken from shapes.

    What it gets as `learnable_sink` are sinks [B, N].
    """

    def load(self, mQ, mK, *rest):
        constant = self.qhead_per_kvhead
        self.qhead_per_kvhead = mQ.shape[2] // mK.shape[2]  # these are [rows, dim, heads, batch]
        try:
            return FlashAttentionForwardSm90.load(self, mQ, mK, *rest)
        finally:
            self.qhead_per_kvhead = constant

    def mma(self, qk, pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, *rest):
        self._sinks = learnable_sink
        arrays = (qk, pv, mO, mLSE, sQ, sK, sVt, sP, sO)
        return FlashAttentionForwardSm90.mma(self, *arrays, None, *rest)

    def epilogue(self, acc_O, lse, *rest):
        *_, head, batch = rest
        if self._sinks is not None:
            _take_in(self._sinks[batch, head], acc_O, lse)
        return FlashAttentionForwardSm90.epilogue(self, acc_O, lse, *rest)
