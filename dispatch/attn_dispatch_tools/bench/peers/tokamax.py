"""tokamax's Mosaic kernels."""

from __future__ import annotations

import jax

from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.jax_nn import call_like_jax_nn
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall


class Tokamax(JaxPeer):
    """The call with Mosaic kernels."""

    name = "tokamax"
    distributions = ("tokamax",)
    module = "tokamax"

    def absent(self) -> str:
        platform = jax.devices()[0].platform
        return super().absent() or (
            "" if platform == "gpu" else f"its Mosaic kernels are for GPUs, and this is {platform}"
        )

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        function = self.package().dot_product_attention
        return call_like_jax_nn(function, "mosaic", cell, arrays)


PEERS = (Tokamax(),)
