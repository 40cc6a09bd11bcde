"""fa4-jax: FlashAttention-4's CuTe DSL kernels."""

from __future__ import annotations

from functools import partial

import jax

from attn_dispatch_tools.bench.arrays import ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall, why_absent


class Fa4Jax(JaxPeer):
    name = "fa4-jax"
    distributions = ("fa4-jax",)
    module = "fa4_jax"

    def absent(self) -> str:
        # fa4-jax imports cutejax, which its kernels need, only at the first call.
        return super().absent() or why_absent("cutejax", "cutejax")

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        package = self.package()
        # "cute" rather than the default, which is plain JAX if there is no GPU.
        options = {"causal": cell.is_causal, "backend": "cute"}
        if cell.window is not None:
            options |= {"causal": False, "window_size": (cell.window - 1, 0)}
        if not cell.lengths:
            return PeerCall(partial(package.flash_attn, **options))

        def packed(q: jax.Array, k: jax.Array, v: jax.Array, cu: jax.Array) -> jax.Array:
            return package.flash_attn_varlen(q, k, v, cu, cu, **options)

        return PeerCall(packed, ROWS, (arrays.cu_seqlens,))


PEERS = (Fa4Jax(),)
