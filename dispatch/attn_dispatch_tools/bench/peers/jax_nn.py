"""jax.nn.dot_product_attention, on cuDNN and on XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from attn_dispatch_tools.bench.arrays import PADDED, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.masks import Mask
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall

_MAX_SCORE_BYTES = 8 << 30
"""The most bytes of scores. XLA holds them all in float32; larger calls would run out of memory."""


def call_like_jax_nn(
    function: Callable[..., jax.Array], implementation: str, cell: Cell, arrays: CellArrays
) -> PeerCall:
    """A cell without a mask by a function with the arguments of jax.nn's. Packed sequences are
    passed as a padded batch with lengths, because there is no other way to express them than a mask
    over all pairs."""
    call = partial(function, is_causal=cell.is_causal, implementation=implementation)
    if cell.window is not None:
        call = partial(call, local_window_size=(cell.window - 1, 0))
    if not cell.lengths:
        return PeerCall(call)

    def padded(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return call(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    return PeerCall(padded, PADDED, (arrays.lengths,))


class JaxNn(JaxPeer):
    """The call with one implementation."""

    def __init__(self, implementation: str):
        self.name = f"jax.nn: {implementation}"
        self.implementation: Any = implementation

    def version(self) -> str:
        return f"jax {jax.__version__}"

    def absent(self) -> str:
        platform = jax.devices()[0].platform
        if self.implementation == "cudnn" and platform != "gpu":
            return f"cuDNN runs on NVIDIA GPUs, and this is {platform}"
        return ""

    def concerns(self, cell: Cell) -> bool:
        return True

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        if self.implementation == "xla":
            batch, longest = cell.batch, cell.seq_len
            if cell.lengths:
                batch, longest = len(cell.lengths), cell.longest
            needed = 4 * batch * cell.num_heads * longest**2
            if needed > _MAX_SCORE_BYTES:
                raise NotImplementedError(f"its scores would take {needed >> 30} GiB")
        if cell.mask is not None:
            return self._masked(cell.mask, arrays)
        return call_like_jax_nn(jax.nn.dot_product_attention, self.implementation, cell, arrays)

    def _masked(self, mask: Mask, arrays: CellArrays) -> PeerCall:
        """The call with causality and a window as arguments, or else with all pairs as an array."""
        attention = partial(jax.nn.dot_product_attention, implementation=self.implementation)
        if mask.is_plain:
            window = {"local_window_size": (mask.window - 1, 0)} if mask.window else {}
            return PeerCall(partial(attention, is_causal=True, **window))

        def masked(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
            return attention(q, k, v, mask=mask)

        return PeerCall(masked, further_arrays=(arrays.dense_mask,))


PEERS = (JaxNn("cudnn"), JaxNn("xla"))
