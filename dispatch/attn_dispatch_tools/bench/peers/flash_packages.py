"""fa4-jax, FlashAttention-4's CuTe DSL kernels; and flash_attn3_jax, FlashAttention-3's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax

from attn_dispatch_tools.bench.arrays import ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall, why_absent


def call_like_flash(
    dense: Callable[..., jax.Array], packed: Callable[..., jax.Array], cell: Cell,
    arrays: CellArrays, *, causal: str = "is_causal", more: Mapping[str, object],
) -> PeerCall:  # fmt: skip
    """A cell by functions with the windows of FlashAttention.

    Args:
      packed: a function of q, k, v and cu_seqlens.
      causal: the name of the functions' argument.
      more: further arguments of both.
    """
    options = {**more, causal: cell.is_causal and cell.window is None}
    if cell.window is not None:
        options["window_size"] = (cell.window - 1, 0)
    if not cell.lengths:
        return PeerCall(partial(dense, **options))
    return PeerCall(partial(packed, **options), ROWS, (arrays.cu_seqlens,))


class Fa4Jax(JaxPeer):
    name = "fa4-jax"
    distributions = ("fa4-jax",)
    module = "fa4_jax"

    def absent(self) -> str:
        # fa4-jax imports cutejax, which its kernels need, only at the first call.
        return super().absent() or why_absent("cutejax", "cutejax")

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        package = self.package()
        return call_like_flash(
            package.flash_attn,
            lambda q, k, v, cu, **options: package.flash_attn_varlen(q, k, v, cu, cu, **options),
            cell, arrays, causal="causal",
            # "cute" rather than the default, which is plain JAX if there is no GPU.
            more={"backend": "cute"},
        )  # fmt: skip


class FlashAttn3Jax(JaxPeer):
    """Its wheels only have kernels for head dim 128."""

    name = "flash_attn3_jax"
    distributions = ("flash-attn3-jax",)
    module = "flash_attn3_jax"

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        if (cell.head_dim, cell.head_dim_v) != (128, 128):
            # Otherwise the call would fail only when it runs, after its memory is allocated.
            raise NotImplementedError("its wheels only have kernels for head dim 128")
        package = self.package()
        longest = {"max_seqlen_q": cell.longest, "max_seqlen_k": cell.longest}
        return call_like_flash(
            package.flash_mha,
            lambda q, k, v, cu, **x: package.flash_mha_varlen(q, k, v, cu, cu, **longest, **x),
            cell, arrays, more={"window_size": (-1, -1)},
        )  # fmt: skip


PEERS = (Fa4Jax(), FlashAttn3Jax())
