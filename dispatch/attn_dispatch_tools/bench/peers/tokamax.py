"""tokamax's Mosaic kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from attn_dispatch_tools.bench.arrays import PADDED, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall


class Tokamax(JaxPeer):
    """The call with Mosaic kernels.

    Packed sequences are passed as a padded batch with lengths, because tokamax can otherwise only
    express them as a mask over all pairs.
    """

    name = "tokamax"
    distributions = ("tokamax",)
    module = "tokamax"

    def absent(self) -> str:
        platform = jax.devices()[0].platform
        return super().absent() or (
            "" if platform == "gpu" else f"its Mosaic kernels are for GPUs, and this is {platform}"
        )

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        package = self.package()
        options: dict[str, Any] = {"is_causal": cell.is_causal, "implementation": "mosaic"}
        if cell.window is not None:
            options["local_window_size"] = (cell.window - 1, 0)
        if not cell.lengths:
            return PeerCall(partial(package.dot_product_attention, **options))

        def padded(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
            return package.dot_product_attention(
                q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options
            )

        return PeerCall(padded, PADDED, (arrays.lengths,))


PEERS = (Tokamax(),)
