"""dew-flash-attn: its public functions or, if the package cannot be imported, its kernels.

Importing the package loads its FlashAttention-2 library, which may be missing. Then its
FlashAttention-3 kernels are called directly, as its public functions do at these head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from attn_dispatch.devices.target import default_device
from attn_dispatch.flash import kernels, library
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.flash.generations import FA3
from attn_dispatch_tools.bench.arrays import ROWS, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.flash_packages import call_like_flash
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
        return call_like_flash(
            package.flash_mha,
            lambda q, k, v, cu, **x: package.flash_mha_varlen(q, k, v, cu, cell.longest, **x),
            cell, arrays, more={"window_size": (-1, -1)},
        )  # fmt: skip


def facts_of(cell: Cell) -> FlashCall:
    """The cell's forward call as the kernels take it."""
    leading = (cell.seq_len,) if cell.lengths else (cell.batch, cell.seq_len)
    q, k = (
        jax.ShapeDtypeStruct((*leading, n, cell.head_dim), "bfloat16")
        for n in (cell.num_heads, cell.num_kv_heads)
    )
    left = None if cell.window is None else cell.window - 1
    return forward_facts(q, k, cell.is_causal, left, len(cell.lengths), cell.longest)


def forward_facts(
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    is_causal: bool,
    left: int | None,
    documents: int,
    longest: int,
) -> FlashCall:
    """A forward call with as many keys as queries.

    Args:
      q, k: [B, T, N, H] and [B, T, K, H], or of packed sequences [rows, N, H] and [rows, K, H].
      left: the keys to the left of a query that it sees; None is open.
      documents, longest: the number of packed sequences, 0 for none, and the greatest length.
    """
    rows, batch = q.shape[-3], q.shape[0] if q.ndim == 4 else 1
    return FlashCall(
        backward=False,
        dtype=q.dtype.name,
        batch=batch,
        is_packed=bool(documents),
        sequences=documents or batch,
        gap=0,
        rows_q=rows,
        rows_kv=rows,
        longest_q=longest or rows,
        longest_kv=longest or rows,
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        is_causal=is_causal and left is None,
        window_left=-1 if left is None else left,
        window_right=0 if is_causal else -1,
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
