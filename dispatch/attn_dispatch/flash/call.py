"""One call in FlashAttention's terms, as its kernels take it.

FlashAttention counts causality and windows from the bottom right, the last query and key of each
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.generations import FA3, Generation
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.real_rows import sees_its_own_key
from attn_dispatch.semantics.wider_arrays import round_up

HEAD_DIM_MULTIPLE = 8
"""Head dims of arrays are multiples of it. Kernels exist for fewer head dims and read zeros beyond
the array's."""


@dataclass(frozen=True)
class FlashCall:
    """A forward or backward call as the kernels take it: padded head dims, bottom-right masks.

    If sequences are packed, `rows_q` and `rows_kv` count the arrays' rows, which have no batch
    axis; otherwise those of a batch row.
    """

    backward: bool
    dtype: str
    """"float16" or "bfloat16"."""
    batch: int
    is_packed: bool
    sequences: int
    """Packed: the number of sequences, without the gaps between them."""
    gap: int
    """Packed: the rows of zeros after each of several batch rows."""
    rows_q: int
    rows_kv: int
    longest_q: int
    longest_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The padded head dim, the same for all arrays."""
    is_causal: bool
    window_left: int
    """Keys to the left of the diagonal that a query sees; -1 is open."""
    window_right: int
    generation: Generation = FA3
    multiprocessors: int = 0
    """The device's number, by which FlashAttention-2 splits the keys."""
    is_end_to_end: bool = False
    """Packed: whether kernels are given the sequences alone; see `lies_end_to_end`."""


def call_of(
    spec: AttentionSpec, generation: Generation = FA3, multiprocessors: int = 0
) -> FlashCall:
    """The call in FlashAttention's terms; the spec breaks no rule of rules.py."""
    in_rows = needs_packing(spec)
    rows = spec.batch if in_rows else 1
    gap = generation.tile if rows > 1 else 0
    left, right = band_from_the_end(spec)
    return FlashCall(
        backward=spec.is_backward,
        dtype=spec.dtype,
        batch=spec.batch,
        is_packed=in_rows,
        sequences=spec.batch * ((spec.most_sequences or 1) if spec.is_packed else 1),
        gap=gap,
        rows_q=rows * (spec.seq_len_q + gap),
        rows_kv=rows * (spec.seq_len_kv + gap),
        longest_q=spec.longest_sequences[0],
        longest_kv=spec.longest_sequences[1],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=head_dim(spec),
        is_causal=(left, right) == (None, 0),
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        generation=generation,
        multiprocessors=multiprocessors,
        is_end_to_end=lies_end_to_end(spec, generation),
    )


def offsets_count(call: FlashCall) -> int:
    """The number of offsets of a packed call on each side; gaps count, see sequences.py."""
    if call.is_end_to_end:
        return call.sequences + 1
    pieces = 0
    if call.generation.cuts_gaps:
        longest = max(call.longest_q, 1), max(call.longest_kv, 1)
        pieces = 1 + call.rows_q // longest[0] + call.rows_kv // longest[1]
    return 3 * call.sequences + 3 + pieces


def needs_packing(spec: AttentionSpec) -> bool:
    """Whether batch rows are not one whole sequence each, so that arrays are passed packed."""
    lengths = ("query_seq_lengths", "key_value_seq_lengths")
    return spec.is_packed or any(map(spec.has, lengths))


def lies_end_to_end(spec: AttentionSpec, generation: Generation) -> bool:
    """Whether only rows past the last sequence can be padding, which is promised to be finite.

    Then cu_seqlens are the kernels' offsets as they are: nothing lies between sequences, and each
    query attends to its own key at least.
    """
    return (
        spec.meaning.finite_padding
        and spec.has("cu_seqlens_q")
        and spec.batch == 1
        and sees_its_own_key(spec)
        and not generation.cuts_gaps
    )


def head_dim(spec: AttentionSpec) -> int:
    """The padded head dim, the same for all arrays."""
    return round_up(max(spec.head_dim, _columns_of_value(spec)), HEAD_DIM_MULTIPLE)


def _columns_of_value(spec: AttentionSpec) -> int:
    """The columns that value needs, with those for the gradient of lse."""
    return spec.head_dim_v + (lse_grad.COLUMNS if spec.has("lse_grad") else 0)


def band_from_the_end(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The band counted from the bottom right. Kernels cannot take a side below 0."""
    left, right = spec.band
    if spec.meaning.causal_alignment == "bottom_right" or needs_packing(spec):
        return left, right
    further = spec.seq_len_kv - spec.seq_len_q
    return (
        None if left is None else left + further,
        None if right is None else right - further,
    )
