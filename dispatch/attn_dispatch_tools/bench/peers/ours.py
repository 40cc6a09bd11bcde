"""The public call of this package, with its own choice and with each implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from attn_dispatch._version import __version__
from attn_dispatch.api import dot_product_attention, ragged_dot_product_attention
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device
from attn_dispatch.inspection import explain
from attn_dispatch_tools.bench.arrays import BATCH, PADDED, ROW, ROWS, Arrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall


@dataclass(frozen=True)
class _Asked:
    """A call of ours: where its arrays lie, the further ones by name, and static options."""

    function: Callable[..., Any]
    layout: str
    named_arrays: dict[str, jax.Array]
    options: dict[str, Any]


class Ours(JaxPeer):
    """Packed sequences go by cu_seqlens, without a batch axis."""

    def __init__(self, implementation: str | None):
        self.name = f"ours: {implementation}" if implementation else "ours"
        self.implementation = implementation

    def version(self) -> str:
        return f"attn-dispatch {__version__}"

    def absent(self) -> str:
        if self.implementation is None:
            return ""
        return select.named(self.implementation).unusable_reason(default_device())

    def notes(self, cell: Cell, arrays: Arrays) -> dict[str, Any]:
        """Which implementations compute it, forward and backward."""
        asked = self._asked(cell, arrays)
        qkv = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.given(asked.layout)[:3]]
        found = explain(*qkv, **asked.named_arrays, **asked.options)
        return {"forward": found.chosen_forward, "backward": found.chosen_backward}

    def call(self, cell: Cell, arrays: Arrays) -> PeerCall:
        asked = self._asked(cell, arrays)
        # Pass the same array for both sides, as a caller would: kernels may rely on that.
        different = {id(x): x for x in asked.named_arrays.values()}
        places = {name: [*different].index(id(x)) for name, x in asked.named_arrays.items()}

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
            named = {name: extra[place] for name, place in places.items()}
            return asked.function(q, k, v, **named, **asked.options)

        return PeerCall(attention, asked.layout, tuple(different.values()))

    def _asked(self, cell: Cell, arrays: Arrays) -> _Asked:
        if not cell.lengths:
            return _Asked(dot_product_attention, BATCH, {}, self._options(cell))
        names = ("cu_seqlens_q", "cu_seqlens_kv")
        longest = {"max_seqlen_q": cell.longest, "max_seqlen_kv": cell.longest}
        return _Asked(
            ragged_dot_product_attention, ROWS, dict.fromkeys(names, arrays.cu_seqlens),
            self._options(cell) | longest,
        )  # fmt: skip

    def _options(self, cell: Cell) -> dict[str, Any]:
        options: dict[str, Any] = {
            "is_causal": cell.is_causal, "implementation": self.implementation
        }  # fmt: skip
        if cell.window is not None:
            options["local_window_size"] = (cell.window - 1, 0)
        return options


class _SegmentIds(Ours):
    """Packed sequences by segment ids, with a batch axis."""

    def __init__(self):
        super().__init__(None)
        self.name = "ours: segment ids"

    def concerns(self, cell: Cell) -> bool:
        return bool(cell.lengths)

    def _asked(self, cell: Cell, arrays: Arrays) -> _Asked:
        static = {"max_segments": len(cell.lengths), "max_segment_len": cell.longest}
        ids = {"query_segment_ids": arrays.segment_ids}
        return _Asked(dot_product_attention, ROW, ids, self._options(cell) | static)


class _Padded(Ours):
    """Packed sequences as a padded batch with lengths."""

    def __init__(self):
        super().__init__(None)
        self.name = "ours: padded"

    def concerns(self, cell: Cell) -> bool:
        return bool(cell.lengths)

    def _asked(self, cell: Cell, arrays: Arrays) -> _Asked:
        lengths = {x: arrays.lengths for x in ("query_seq_lengths", "key_value_seq_lengths")}
        return _Asked(dot_product_attention, PADDED, lengths, self._options(cell))


PEERS = (
    Ours(None), Ours("cudnn"), Ours("flash"), Ours("fa4"), _SegmentIds(), _Padded()
)  # fmt: skip
