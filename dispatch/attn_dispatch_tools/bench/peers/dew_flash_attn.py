"""dew-flash-attn: its public functions or, if the package cannot be imported, its kernels.

Importing the package loads its FlashAttention-2 library, which may be missing. Then its
FlashAttention-3 kernels are called directly, as its public functions do at these head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from attn_dispatch.devices.target import default_device
from attn_dispatch.flash import kernels, library
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.flash.generations import FA3
from attn_dispatch_tools.bench.arrays import ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall, is_installed, why_absent


class DewFlashAttn(JaxPeer):
    name = "dew-flash-attn"
    distributions = library.DISTRIBUTIONS
    module = "dew_flash_attn"

    def absent(self) -> str:
        reason = why_absent(self.module, self.distributions[0])
        if not reason or not is_installed(self.module):
            return reason
        other = str(library.unusable_reason() or "")
        if not other and default_device().arch != "sm90":
            other = "its FlashAttention-3 library is for sm90"
        other = other or library.loading_failure(FA3)
        return f"{reason}; {other}" if other else ""

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        is_importable = not why_absent(self.module, self.distributions[0])
        called = "its public function" if is_importable else "its FlashAttention-3 kernels"
        return {"called": called}

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        if cell.head_dim != cell.head_dim_v:
            raise NotImplementedError("its kernels need equal head dims of query and value")
        if why_absent(self.module, self.distributions[0]):
            kernels = kernels_of(facts_of(cell))
            return (
                PeerCall(kernels, ROWS, (arrays.cu_seqlens,)) if cell.lengths else PeerCall(kernels)
            )
        package = self.package()
        options = {"is_causal": cell.is_causal, "window_size": (-1, -1)}
        if cell.window is not None:
            options = {"is_causal": False, "window_size": (cell.window - 1, 0)}
        if not cell.lengths:
            return PeerCall(partial(package.flash_mha, **options))

        def packed(q: jax.Array, k: jax.Array, v: jax.Array, cu: jax.Array) -> jax.Array:
            return package.flash_mha_varlen(q, k, v, cu, cell.longest, **options)

        return PeerCall(packed, ROWS, (arrays.cu_seqlens,))


def facts_of(cell: Cell) -> FlashCall:
    """The cell's forward call as the kernels take it."""
    return FlashCall(
        backward=False,
        dtype="bfloat16",
        batch=cell.batch,
        is_packed=bool(cell.lengths),
        sequences=len(cell.lengths) or cell.batch,
        gap=0,
        rows_q=cell.seq_len,
        rows_kv=cell.seq_len,
        longest_q=cell.longest or cell.seq_len,
        longest_kv=cell.longest or cell.seq_len,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        is_causal=cell.is_causal and cell.window is None,
        window_left=-1 if cell.window is None else cell.window - 1,
        window_right=0 if cell.is_causal else -1,
        is_end_to_end=True,
    )


def kernels_of(facts: FlashCall) -> Callable[..., jax.Array]:
    """FlashAttention-3's kernels for a forward call, with nothing before or after them.

    The function takes query, key, value and, for packed sequences, cu_seqlens; it has gradients.
    """
    library.register(FA3)
    scale = facts.head_dim**-0.5

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *cu: jax.Array) -> jax.Array:
        return kernels.forward(facts, (q, k, v), cu * 2, scale)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *cu: jax.Array):
        out, lse = kernels.forward(facts, (q, k, v), cu * 2, scale)
        return out, (q, k, v, out, lse, cu)

    def backward(residuals: Any, out_grad: jax.Array):
        *operands, cu = residuals
        grads = kernels.backward(
            replace(facts, backward=True), (out_grad, *operands), cu * 2, scale
        )
        return *grads, *(None for _ in cu)

    attention.defvjp(forward, backward)
    return attention


PEERS = (DewFlashAttn(),)
