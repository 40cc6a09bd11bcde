"""One attention call in cuDNN's terms: the options that express a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.score_nodes import nodes_of, score_rules_of
from attn_dispatch.programs.nodes import NodeArray, XlaArray
from attn_dispatch.reason import Reason
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.real_rows import leading_padding_rows
from attn_dispatch.semantics.scaled_query import positive_scale
from attn_dispatch.semantics.wider_arrays import round_up

_HEAD_DIM_MULTIPLE = 8
"""Strides must be multiples of 16 bytes (cudnn-frontend issue 1571)."""
_PACKED_HEAD_DIM_MULTIPLE = 16
"""For other head dims cudnn-frontend sizes the workspace as if each packed sequence were the
longest."""

_WIDE_HEAD_DIM = 128
"""With wider heads and a smaller value dim, some versions write garbage in the backward pass."""

_MIN_PACKED_QUERIES = 2
"""If the longest sequence has one query, cuDNN takes a kernel for decoding, whose lse is wrong for
packed sequences (H200, 9.19). Declaring a longer one changes nothing else."""

Extents = tuple[int, int, int, int]

Attribute: TypeAlias = bool | int | float | str
Attributes: TypeAlias = Mapping[str, Attribute]
"""The custom call's attributes by name, as `CudnnCall.attributes` has them."""


@dataclass(frozen=True)
class CudnnCall:
    """The custom call's attributes, field for field as ATTN_SDPA_SPEC of cuda_backend/spec.h."""

    backward: bool
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    window_left: int
    window_right: int
    bottom_right: bool
    has_lengths: bool
    packed_rows_q: int
    packed_rows_kv: int
    head_rows_q: int
    """With heads first: how many rows of one head are contiguous, those of the array or, if packed,
    of a batch row. 0 if the heads of a row are contiguous."""
    head_rows_kv: int
    """Likewise for keys; in pages, the rows of a page."""
    page_size: int
    num_pages: int
    has_value_table: bool
    """Whether values have a separate page table."""
    bends_scores: bool
    """Whether the gradient of the scores changes too, as under a soft cap."""
    moves_scores: bool
    """Whether score_mod, mask_mod or ALiBi is applied."""
    score_nodes: str
    gradient_nodes: str
    node_arrays: str
    bias_dtype: str
    bias_batch: int
    bias_heads: int
    bias_rows: int
    has_sinks: bool
    dropout_rate: float
    needs_lse: bool
    needs_max: bool
    needs_keep: bool
    deterministic: bool
    """Whether every result must have the same bits in every call."""
    needs_dbias: bool
    clears_rows: bool
    engine: str = ""
    """A cuDNN engine with its knobs, "6 KERNEL_CFG=2 STREAM_K=1"; "" is the heuristics' choice."""

    @property
    def attributes(self) -> dict[str, Attribute]:
        """The fields by name, as the functions of `_cuda` take them."""
        return asdict(self)

    @property
    def is_packed(self) -> bool:
        """Whether arrays are [rows, heads, dim], with offsets where sequences begin."""
        return self.packed_rows_q > 0

    @property
    def decodes(self) -> bool:
        """Whether cuDNN's kernel for decoding computes the call: a single query with lengths.

        That kernel does not read past a length, in arrays or in pages. With any option but a scale
        cuDNN takes another kernel, which multiplies by what is stored there: 0 · NaN is NaN.
        """
        is_single = not self.backward and self.seq_len_q == 1 and not self.is_packed
        has_band = self.window_left >= 0 or self.window_right >= 0
        more = has_band or self.score_nodes or self.bias_dtype or self.has_sinks
        return is_single and self.has_lengths and not (more or self.dropout_rate)

    @property
    def packed_elements(self) -> int:
        """Elements of the largest packed array, which offsets must be able to count."""
        queries = self.packed_rows_q * self.num_heads
        keys = self.packed_rows_kv * self.num_kv_heads
        return max(queries, keys) * max(self.head_dim, self.head_dim_v)

    @property
    def has_statistics(self) -> bool:
        return self.backward or self.needs_lse or self.needs_max

    @property
    def reads_batch_of_one_row(self) -> bool:
        """Whether a mod reads an array [batch, ·, 1, 1] of several batch rows."""
        return any(batch != "1" and rows == "1" for batch, _, rows, _ in self._array_extents())

    @property
    def arrays_by_row(self) -> int:
        """The number of arrays with several rows that mods read."""
        return sum(rows != "1" for _, _, rows, _ in self._array_extents())

    def _array_extents(self) -> list[list[str]]:
        return [array.split()[1:] for array in self.node_arrays.split(",") if array]


@dataclass(frozen=True)
class Band:
    """The keys around the diagonal that a query sees, in cuDNN's terms; -1 is an open side."""

    left: int
    right: int
    bottom_right: bool


OPEN = Band(-1, -1, bottom_right=False)


@lru_cache(maxsize=1024)
def variants_of(spec: AttentionSpec) -> tuple[CudnnCall, ...]:
    """The variants of the call for cuDNN, best first; the spec breaks no rule of rules.py.

    With lengths known at run time, arrays are passed packed: cuDNN then does not read behind the
    end of a sequence, where NaN may be. A padded batch is the second variant; its padding is
    replaced by 0.

    Without such lengths, the second variant has a padding mask with full lengths. It changes no
    result, but avoids several known bugs and allows a window with unequal numbers of queries and
    keys. The third is packed, which allows sinks with a single query.

    Calls for the decoding kernel start with the padded variant. Paged calls have only that one.
    """
    if spec.is_paged:
        return (_call(spec, packed=False),)
    variants = [_call(spec, packed=True)]
    if not spec.is_packed:
        plain = _call(spec, packed=False)
        has_lengths = spec.has_runtime_lengths
        if not has_lengths:
            variants = [plain, replace(plain, has_lengths=True), *variants]
        else:
            variants = [plain, *variants] if plain.decodes else [*variants, plain]
    return tuple(call for variant in variants for call in _also_with_wide_value(variant))


def _also_with_wide_value(call: CudnnCall) -> tuple[CudnnCall, ...]:
    """The call and, where known_bad.cc may refuse it, the call with value padded to key's width."""
    if call.backward and call.head_dim > _WIDE_HEAD_DIM and call.head_dim_v < call.head_dim:
        return call, replace(call, head_dim_v=call.head_dim)
    return (call,)


def has_score_bias(spec: AttentionSpec) -> bool:
    """Whether an array is added to the scores: a bias, or a mask turned into one."""
    return spec.has("bias") or spec.has("mask")


def counts_alibi_from_lengths(spec: AttentionSpec) -> bool:
    """Whether ALiBi's diagonal depends on lengths that are known at run time only."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    return spec.has("alibi_slopes") and is_bottom_right and spec.has_runtime_lengths


def band_of(spec: AttentionSpec) -> Band | None:
    """The window and causality in cuDNN's terms; None if cuDNN cannot express them."""
    left, right = (-1 if side is None else side for side in spec.band)
    # With equal lengths both alignments are the same, and kernels skip more from the top left.
    if spec.meaning.causal_alignment == "top_left" or spec.meaning.same_lengths:
        return Band(left, right, bottom_right=False)
    if spec.seq_len_q - leading_padding_rows(spec) == 1:
        right = -1  # no key is right of the last query; with a band cuDNN would not split the keys
    offset = spec.seq_len_kv - (spec.seq_len_q - leading_padding_rows(spec))
    if not spec.has_runtime_lengths and offset == 0:
        return Band(left, right, bottom_right=False)
    needs_top_left = spec.has("alibi_slopes")
    if (left, right) == (-1, -1) and not needs_top_left:
        return OPEN
    # cuDNN cannot combine its bottom-right mask with any of these.
    if not (needs_top_left or has_score_bias(spec) or spec.meaning.dropout_rate):
        return Band(left, right, bottom_right=True)
    if spec.has_runtime_lengths:
        return None if (left, right) != (-1, -1) else OPEN
    # The same band, counted from the top left. No side may be negative: that would mean open.
    from_left = left if left < 0 else left - offset
    from_right = right if right < 0 else right + offset
    if (left >= 0 > from_left) or (right >= 0 > from_right):
        return None
    return Band(from_left, from_right, bottom_right=False)


def has_nodes(spec: AttentionSpec) -> bool:
    """Whether scores are changed in ways that cuDNN takes as nodes."""
    return (
        bool(spec.meaning.mods)
        or spec.meaning.logits_soft_cap is not None
        or spec.has("alibi_slopes")
    )


def node_array_extents(spec: AttentionSpec, call: CudnnCall, array: NodeArray) -> Extents:
    """Batch, heads, rows and keys of an array that nodes read; 1 along axes that it lacks."""
    axes = array.axes
    if isinstance(array, XlaArray) and spec.shape("mods_start")[0] > 1:
        axes += "bt"  # cuDNN misreads arrays by batch row alone: programs/nodes.py
    extents = {"b": call.batch, "n": call.num_heads, "t": call.seq_len_q, "s": call.seq_len_kv}
    b, n, t, s = (extents[x] if x in axes else 1 for x in "bnts")
    return b, n, t, s


def _with_nodes(spec: AttentionSpec, call: CudnnCall) -> CudnnCall:
    """The call with its nodes and the extents of the arrays that they read."""
    nodes, rules = nodes_of(spec, packed=call.is_packed), score_rules_of(spec)
    if isinstance(nodes, Reason):
        raise ValueError(f"expected mods that cuDNN can express: {nodes}")
    arrays: list[str] = []
    for array in nodes.arrays:
        extents = node_array_extents(spec, call, array)
        arrays.append(" ".join(["f" if array.dtype == "float32" else "i", *map(str, extents)]))
    return replace(
        call,
        scale=call.scale * nodes.factor,
        bends_scores=rules.bends,
        moves_scores=rules.moves,
        score_nodes=nodes.forward,
        gradient_nodes=nodes.backward,
        node_arrays=", ".join(arrays),
    )


def _call(spec: AttentionSpec, *, packed: bool) -> CudnnCall:
    band = band_of(spec)
    if band is None:
        raise ValueError(f"expected a band that cuDNN has, got that of {spec}")
    # cuDNN has no bottom-right mask with such rows: they are cut off.
    padding = leading_padding_rows(spec)
    rows_q = spec.seq_len_q - padding
    longest_q, longest_kv = spec.longest_sequences
    multiple = _PACKED_HEAD_DIM_MULTIPLE if packed else _HEAD_DIM_MULTIPLE
    extra_columns = lse_grad.COLUMNS if spec.has("lse_grad") else 0
    bias_batch, bias_heads, bias_rows = _bias_extents(spec, rows_q)
    batch = spec.batch * (spec.most_sequences or 1)
    forward = not spec.is_backward
    # cudnn-frontend sizes its float32 gradients of packed arrays by the arrays' strides. With heads
    # first these buffers are too small, and kernels write past them (wrong gradients and illegal
    # instructions, H200, 9.19).
    allows_heads_first = forward or not packed
    call = CudnnCall(
        backward=spec.is_backward,
        dtype=spec.dtype,
        batch=batch,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        seq_len_q=max(longest_q - padding, _MIN_PACKED_QUERIES) if packed else rows_q,
        seq_len_kv=longest_kv,
        head_dim=round_up(spec.head_dim, multiple),
        head_dim_v=round_up(spec.head_dim_v + extra_columns, multiple),
        scale=positive_scale(spec),
        window_left=band.left,
        window_right=band.right,
        bottom_right=band.bottom_right,
        has_lengths=packed or spec.has_runtime_lengths,
        packed_rows_q=spec.batch * rows_q if packed else 0,
        packed_rows_kv=spec.batch * spec.seq_len_kv if packed else 0,
        head_rows_q=rows_q if spec.meaning.heads_first_q and allows_heads_first else 0,
        head_rows_kv=_key_rows(spec) if spec.meaning.heads_first_kv and allows_heads_first else 0,
        page_size=spec.page_size if spec.is_paged else 0,
        num_pages=math.prod(spec.shape("key_pages")[:2]) if spec.is_paged else 0,
        has_value_table=spec.meaning.value_page > 0,
        bends_scores=False,
        moves_scores=False,
        score_nodes="",
        gradient_nodes="",
        node_arrays="",
        bias_dtype=_bias_dtype(spec),
        bias_batch=bias_batch,
        bias_heads=bias_heads,
        bias_rows=bias_rows,
        has_sinks=forward and spec.has("sinks"),
        dropout_rate=spec.meaning.dropout_rate,
        # lse follows from the row's maximum and sum.
        needs_lse=forward and spec.wanted.needs_lse and not spec.wanted.needs_max,
        needs_max=forward and spec.wanted.needs_max,
        needs_keep=forward and spec.wanted.needs_keep,
        deterministic=spec.meaning.deterministic_backward,
        needs_dbias="bias" in spec.wanted.gradients,
        clears_rows=spec.has_runtime_lengths and not spec.promises.ignores_padding_rows,
    )
    return _with_nodes(spec, call) if has_nodes(spec) else call


def _key_rows(spec: AttentionSpec) -> int:
    """The keys of a batch row or, in pages, of a page."""
    return spec.page_size if spec.is_paged else spec.seq_len_kv


def _bias_dtype(spec: AttentionSpec) -> str:
    if not has_score_bias(spec):
        return ""
    # A mask needs only 0 and -inf, which every dtype has.
    is_own = not spec.has("bias") or spec.dtype_of("bias") == spec.dtype
    return spec.dtype if is_own else "float32"


def _bias_extents(spec: AttentionSpec, rows_q: int) -> tuple[int, int, int]:
    """Batch, heads and rows of the one array that holds bias and mask."""
    shapes = [spec.shape(name)[:3] for name in ("bias", "mask") if spec.has(name)]
    if not shapes:
        return 1, 1, 1
    batch, heads, rows = (max(extents) for extents in zip(*shapes, strict=True))
    return batch, heads, rows_q if rows > 1 else 1
