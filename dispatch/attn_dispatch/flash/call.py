"""One call's facts in FlashAttention's own terms: what its kernels are told.

FlashAttention counts causality and windows from the last query and key of each sequence, at the
bottom right.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.generations import FA3, Generation
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.padding import round_up
from attn_dispatch.semantics.row_ids import is_packed, longest_sequence, most_sequences

HEAD_DIM_MULTIPLE = 8
"""Of the arrays; kernels are compiled for fewer head dims, and read zeros beyond the array's."""


@dataclass(frozen=True)
class FlashCall:
    """A call of either pass as the kernels see it: head dims padded, masks from the bottom right.

    Where sequences are packed, `rows_q` and `rows_kv` are those of the arrays, which have no batch
    axis; else those of a batch row.
    """

    backward: bool
    dtype: str
    """"float16" or "bfloat16"."""
    batch: int
    is_packed: bool
    sequences: int
    """Packed: how many, gaps between them not counted."""
    gap: int
    """Packed: rows of zeros after each batch row, if there are several."""
    rows_q: int
    rows_kv: int
    longest_q: int
    longest_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of query and key, padded."""
    head_dim_v: int
    """Of value and the output, padded: as many, but for kernels that run fewer of them."""
    is_causal: bool
    window_left: int
    """Keys to the left of the diagonal that a query sees; -1 is open."""
    window_right: int
    generation: Generation = FA3
    multiprocessors: int = 0
    """Of the device; how FlashAttention-2 divides the keys depends on it."""


def call_of(
    spec: AttentionSpec, generation: Generation = FA3, multiprocessors: int = 0
) -> FlashCall:
    """The call in FlashAttention's terms, of a spec that rules.py does not refuse."""
    in_rows = needs_packing(spec)
    rows = spec.batch if in_rows else 1
    gap = generation.tile if rows > 1 else 0
    left, right = band_from_the_end(spec)
    return FlashCall(
        backward=spec.is_backward,
        dtype=spec.dtype,
        batch=spec.batch,
        is_packed=in_rows,
        sequences=spec.batch * ((most_sequences(spec) or 1) if is_packed(spec) else 1),
        gap=gap,
        rows_q=rows * (spec.seq_len_q + gap),
        rows_kv=rows * (spec.seq_len_kv + gap),
        longest_q=longest_sequence(spec, "query"),
        longest_kv=longest_sequence(spec, "key"),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=head_dim(spec),
        head_dim_v=head_dim(spec),
        is_causal=(left, right) == (None, 0),
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        generation=generation,
        multiprocessors=multiprocessors,
    )


def offsets_count(call: FlashCall) -> int:
    """How many offsets a packed call has on each side: sequences.py makes gaps sequences too."""
    pieces = 0
    if call.generation.cuts_gaps:
        pieces = 1 + call.rows_q // call.longest_q + call.rows_kv // call.longest_kv
    return 3 * call.sequences + 3 + pieces


def needs_packing(spec: AttentionSpec) -> bool:
    """Whether a batch row is not one whole sequence, so that the call goes as a packed one."""
    lengths = ("query_seq_lengths", "key_value_seq_lengths")
    return is_packed(spec) or any(map(spec.has, lengths))


def head_dim(spec: AttentionSpec) -> int:
    """The one head dim of all arrays."""
    return round_up(max(spec.head_dim, columns_of_value(spec)), HEAD_DIM_MULTIPLE)


def columns_of_value(spec: AttentionSpec) -> int:
    """Those that value needs: the gradient of lse takes some too."""
    return spec.head_dim_v + (lse_grad.COLUMNS if spec.has("lse_grad") else 0)


def band_from_the_end(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The band as it is from the bottom right; a side below 0 is none that kernels know."""
    left, right = spec.band
    if spec.meaning.causal_alignment == "bottom_right" or needs_packing(spec):
        return left, right
    further = spec.seq_len_kv - spec.seq_len_q
    return (
        None if left is None else left + further,
        None if right is None else right - further,
    )
