"""The public calls of this package, with the default choice and with each implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from attn_dispatch._version import __version__
from attn_dispatch.api import dot_product_attention
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device
from attn_dispatch.inspection import explain
from attn_dispatch.programs.functions import MaskMod
from attn_dispatch.ragged import ragged_dot_product_attention
from attn_dispatch_tools.bench.arrays import BATCH, PADDED, ROW, ROWS, CellArrays
from attn_dispatch_tools.bench.cells import DENSE_CAUSAL, Cell
from attn_dispatch_tools.bench.masks import Mask
from attn_dispatch_tools.bench.peers.peer import JaxPeer, MeasuredProgram, PeerCall
from attn_dispatch_tools.bench.peers.written_masks import written_mask


@dataclass(frozen=True)
class _PublicCall:
    """How a cell is passed to a public function."""

    function: Callable[..., Any]
    layout: str
    """The layout of query, key and value."""
    named_arrays: dict[str, jax.Array]
    """Further array arguments."""
    options: dict[str, Any]
    """Static arguments."""
    mod: Callable[..., MaskMod] | None = None
    """Returns the call's mask_mod for the arrays that it reads."""
    mod_arrays: tuple[jax.Array, ...] = ()


Packing = Callable[[Cell, CellArrays], _PublicCall]
"""How packed sequences are passed, without the options that every call has."""


def _with_cu_seqlens(cell: Cell, arrays: CellArrays) -> _PublicCall:
    """Without a batch axis."""
    named = {x: arrays.cu_seqlens for x in ("cu_seqlens_q", "cu_seqlens_kv")}
    longest = {"max_seqlen_q": cell.longest, "max_seqlen_kv": cell.longest}
    return _PublicCall(ragged_dot_product_attention, ROWS, named, longest)


def _with_finite_padding(cell: Cell, arrays: CellArrays) -> _PublicCall:
    """With the promise that padding is finite."""
    call = _with_cu_seqlens(cell, arrays)
    return replace(call, options=call.options | {"finite_padding": True})


def _with_known_lengths(cell: Cell, arrays: CellArrays) -> _PublicCall:
    """The lengths are known as the call is traced, and show that there is no padding."""
    call = _with_cu_seqlens(cell, arrays)
    known = dict.fromkeys(call.named_arrays, np.asarray(arrays.cu_seqlens))
    return replace(call, named_arrays={}, options=call.options | known)


def _with_segment_ids(cell: Cell, arrays: CellArrays) -> _PublicCall:
    """With a batch axis."""
    static = {"max_segments": len(cell.lengths), "max_segment_len": cell.longest}
    ids = {"query_segment_ids": arrays.segment_ids}
    return _PublicCall(dot_product_attention, ROW, ids, static)


def _padded(cell: Cell, arrays: CellArrays) -> _PublicCall:
    """As a padded batch with lengths."""
    lengths = {x: arrays.lengths for x in ("query_seq_lengths", "key_value_seq_lengths")}
    return _PublicCall(dot_product_attention, PADDED, lengths, {})


class Ours(JaxPeer):
    """The call with one implementation, or with the default choice if that is None.

    A peer with another `packing` concerns packed sequences alone.
    """

    def __init__(
        self, implementation: str | None, name: str = "", packing: Packing = _with_cu_seqlens
    ):
        self.name = name or (f"ours: {implementation}" if implementation else "ours")
        self.implementation = implementation
        self.packing = packing

    def version(self) -> str:
        return f"attn-dispatch {__version__}"

    def absent(self) -> str:
        if self.implementation is None:
            return ""
        return select.named(self.implementation).unusable_reason(default_device())

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        """The implementations that compute the cell, forward and backward."""
        if cell.mask is not None and self.implementation is not None:
            return {}  # the name says so, and explaining a mask takes a second
        call = self._public_call(cell, arrays)
        qkv = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.inputs(call.layout)[:3]]
        mod = None if call.mod is None else call.mod(*call.mod_arrays)
        found = explain(*qkv, mask_mod=mod, **call.named_arrays, **call.options)
        return {"forward": found.chosen_forward, "backward": found.chosen_backward}

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        call = self._public_call(cell, arrays)
        # An array that serves queries and keys stays one array, because kernels may rely on that.
        different = {id(x): x for x in call.named_arrays.values()}
        places = {name: [*different].index(id(x)) for name, x in call.named_arrays.items()}

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, *further: jax.Array) -> jax.Array:
            named = {name: further[place] for name, place in places.items()}
            read = further[len(different) :]
            mod = None if call.mod is None else call.mod(*read)
            return call.function(q, k, v, mask_mod=mod, **named, **call.options)

        return PeerCall(attention, call.layout, (*different.values(), *call.mod_arrays))

    def concerns(self, cell: Cell) -> bool:
        return bool(cell.lengths) or self.packing is _with_cu_seqlens

    def _public_call(self, cell: Cell, arrays: CellArrays) -> _PublicCall:
        if cell.mask is not None:
            written = written_mask(cell.mask, arrays)
            return _PublicCall(
                dot_product_attention, BATCH, written.named_arrays,
                {"implementation": self.implementation} | written.options, written.mod,
                written.mod_arrays,
            )  # fmt: skip
        options: dict[str, Any] = {
            "is_causal": cell.is_causal, "implementation": self.implementation
        }  # fmt: skip
        if cell.window is not None:
            options["local_window_size"] = (cell.window - 1, 0)
        if not cell.lengths:
            return _PublicCall(dot_product_attention, BATCH, {}, options)
        call = self.packing(cell, arrays)
        return replace(call, options=options | call.options)


class _Xla(Ours):
    """XLA, for masks only: it computes all pairs, whatever the mask."""

    def concerns(self, cell: Cell) -> bool:
        return cell.mask is not None

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        if cell.num_heads * cell.seq_len**2 > _MAX_XLA_PAIRS:
            raise NotImplementedError(
                f"XLA computes all pairs, and is measured up to {_MAX_XLA_PAIRS:,} of them"
            )
        return super().call(cell, arrays)


_MAX_XLA_PAIRS = 2**31
"""The pairs of 32 heads with 8,192 queries and keys."""


class _DenseCausal(Ours):
    """FlashAttention-3 with causality as the only mask: what times with masks are divided by."""

    def concerns(self, cell: Cell) -> bool:
        return cell.mask is not None

    def program(self, cell: Cell, direction: str, arrays: CellArrays) -> MeasuredProgram:
        return _NotCompared(super().program(self._causal(cell), direction, arrays))

    @staticmethod
    def _causal(cell: Cell) -> Cell:
        return replace(cell, mask=Mask())


class _NotCompared:
    """A program that computes something else than the cell."""

    def __init__(self, program: MeasuredProgram):
        self.facts = program.facts
        self.seconds, self.device_seconds = program.seconds, program.device_seconds

    def results(self) -> None:
        return None


PEERS = (
    Ours(None), Ours("cudnn"), Ours("flash"), Ours("fa4"), _Xla("xla"),
    _DenseCausal("flash", DENSE_CAUSAL),
    Ours(None, "ours: finite padding", _with_finite_padding),
    Ours(None, "ours: known lengths", _with_known_lengths),
    Ours(None, "ours: segment ids", _with_segment_ids), Ours(None, "ours: padded", _padded),
)  # fmt: skip
