"""flash_attn3_jax: FlashAttention-3. Its wheels only have kernels for head dim 128."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from attn_dispatch_tools.bench.arrays import ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall


class FlashAttn3Jax(JaxPeer):
    name = "flash_attn3_jax"
    distributions = ("flash-attn3-jax",)
    module = "flash_attn3_jax"

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        if (cell.head_dim, cell.head_dim_v) != (128, 128):
            # Otherwise the call would fail only when it runs, after its memory is allocated.
            raise NotImplementedError("its wheels only have kernels for head dim 128")
        package = self.package()
        options: dict[str, Any] = {"is_causal": cell.is_causal, "window_size": (-1, -1)}
        if cell.window is not None:
            options = {"is_causal": False, "window_size": (cell.window - 1, 0)}
        if not cell.lengths:
            return PeerCall(partial(package.flash_mha, **options))

        def packed(q: jax.Array, k: jax.Array, v: jax.Array, cu: jax.Array) -> jax.Array:
            longest = cell.longest
            return package.flash_mha_varlen(
                q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, **options
            )

        return PeerCall(packed, ROWS, (arrays.cu_seqlens,))


PEERS = (FlashAttn3Jax(),)
