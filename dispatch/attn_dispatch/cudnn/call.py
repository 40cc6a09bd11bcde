"""One attention call in cuDNN's terms: which of its options say what the spec means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.caps_and_slopes import Alibi
from attn_dispatch.programs.factor import without_factor
from attn_dispatch.programs.kernel import KernelProgram, Pairs, ScoreRules, kernel_program
from attn_dispatch.programs.nodes import NodeArray, XlaArray
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.padding import round_up
from attn_dispatch.semantics.row_ids import is_packed, most_sequences
from attn_dispatch.semantics.scaled_query import is_normal, positive_scale

_HEAD_DIM_MULTIPLE = 8
"""Strides must be multiples of 16 bytes (cudnn-frontend issue 1571)."""
_PACKED_HEAD_DIM_MULTIPLE = 16
"""Else cudnn-frontend sizes the workspace of packed sequences as if each were the longest."""

_WIDE_HEAD_DIM = 128
"""Beyond it some versions write garbage in some backward passes with a smaller value dim."""

_MIN_PACKED_QUERIES = 2
"""For a longest sequence of one query cuDNN takes a kernel for decoding, whose lse is wrong for
packed sequences (H200, 9.19). To say that it might be longer changes nothing else."""


MAX_NODES = 256
"""Operations of a cuDNN graph, its own among them: cuda_backend refuses more. For slightly fewer
cuDNN gives the reason itself."""

MAX_NODE_ARRAYS = 62
"""Arrays that the operations read. With 62 calls run; with 100 cuDNN plans the call and then fails
when it runs (H200, 9.19)."""

Extents = tuple[int, int, int, int]


@dataclass(frozen=True)
class CudnnCall:
    """The custom call's attributes: field for field ATTN_SDPA_SPEC of cuda_backend/spec.h."""

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
    """Rows of a head that follow one another: of an array, or packed of a batch row. 0: the heads
    of a row do."""
    head_rows_kv: int
    """Likewise of keys; in pages those of a page."""
    page_size: int
    num_pages: int
    has_value_table: bool
    """Whether values have a page table of their own."""
    bends_scores: bool
    moves_scores: bool
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
    """Every result has the same bits in every call."""
    needs_dbias: bool
    clears_rows: bool
    engine: str = ""
    """One of cuDNN's with its knobs, "6 KERNEL_CFG=2 STREAM_K=1"; "": what its heuristics take."""

    @property
    def is_packed(self) -> bool:
        """Whether arrays are [rows, heads, dim], with offsets that say where sequences begin."""
        return self.packed_rows_q > 0

    @property
    def decodes(self) -> bool:
        """Whether cuDNN's kernel for decoding computes it, of a single query beside lengths.

        That keeps away from what stands past a length, in arrays as they are and in pages. With
        anything more than a scale the query is another kernel's, which multiplies by it.
        """
        is_single = not self.backward and self.seq_len_q == 1 and not self.is_packed
        has_band = self.window_left >= 0 or self.window_right >= 0
        more = has_band or self.score_nodes or self.bias_dtype or self.has_sinks
        return is_single and self.has_lengths and not (more or self.dropout_rate)

    @property
    def packed_elements(self) -> int:
        """Elements of the largest packed array; what offsets count."""
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
        """How many arrays mods read that have several rows."""
        return sum(rows != "1" for _, _, rows, _ in self._array_extents())

    def _array_extents(self) -> list[list[str]]:
        return [array.split()[1:] for array in self.node_arrays.split(",") if array]


@dataclass(frozen=True)
class Band:
    """Which keys a query sees around the diagonal, in cuDNN's terms; -1 is open."""

    left: int
    right: int
    bottom_right: bool


OPEN = Band(-1, -1, bottom_right=False)


def variants_of(spec: AttentionSpec) -> tuple[CudnnCall, ...]:
    """The call as cuDNN may be asked for it, best first; for a spec that rules.py lets pass.

    Where sequences have lengths of their own, arrays go packed: cuDNN then keeps away from what
    stands behind the end of a sequence, NaN for example. A batch of sequences can also go as it is,
    after what stands there has been replaced by 0.

    Elsewhere a second variant has a padding mask of full lengths, which changes nothing but
    steers clear of several known bugs, and lifts the rule that a window needs as many keys as
    queries. A third one goes packed, which lifts the rule that a single query has no sink.

    What the kernel for decoding computes goes as it is; what is in pages has no other way.
    """
    if spec.is_paged:
        return (_call(spec, packed=False),)
    variants = [_call(spec, packed=True)]
    if not is_packed(spec):
        plain = _call(spec, packed=False)
        has_lengths = has_runtime_lengths(spec)
        if not has_lengths:
            variants = [plain, replace(plain, has_lengths=True), *variants]
        else:
            variants = [plain, *variants] if plain.decodes else [*variants, plain]
    return tuple(call for variant in variants for call in _also_with_wide_value(variant))


def _also_with_wide_value(call: CudnnCall) -> tuple[CudnnCall, ...]:
    """The call, and it with value as wide as key where known_bad.cc may want that."""
    if call.backward and call.head_dim > _WIDE_HEAD_DIM and call.head_dim_v < call.head_dim:
        return call, replace(call, head_dim_v=call.head_dim)
    return (call,)


def leading_padding_rows(spec: AttentionSpec) -> int:
    """How many leading rows causality leaves without a key; they are cut off.

    cuDNN has no bottom-right mask with such rows.
    """
    if (
        not spec.meaning.is_causal
        or spec.meaning.causal_alignment == "top_left"
        or has_runtime_lengths(spec)
    ):
        return 0
    return max(spec.seq_len_q - spec.seq_len_kv, 0)


def has_runtime_lengths(spec: AttentionSpec) -> bool:
    """Whether sequences have lengths that only the arrays know."""
    lengths = spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths")
    return lengths or is_packed(spec)


def has_score_bias(spec: AttentionSpec) -> bool:
    """Whether something is added to every score from an array: a bias, or a mask as one."""
    return spec.has("bias") or spec.has("mask")


def counts_alibi_from_lengths(spec: AttentionSpec) -> bool:
    """Whether ALiBi's diagonal starts where only the arrays know."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    return spec.has("alibi_slopes") and is_bottom_right and has_runtime_lengths(spec)


def band_of(spec: AttentionSpec) -> Band | None:
    """The window and causality, None where cuDNN cannot be told."""
    left, right = (-1 if side is None else side for side in spec.band)
    # With as many keys as queries both corners are one, and kernels skip more from the top left.
    if spec.meaning.causal_alignment == "top_left" or spec.meaning.same_lengths:
        return Band(left, right, bottom_right=False)
    if spec.seq_len_q - leading_padding_rows(spec) == 1:
        right = -1  # it is the last: a band would cost the kernel for decoding its split of keys
    offset = spec.seq_len_kv - (spec.seq_len_q - leading_padding_rows(spec))
    if not has_runtime_lengths(spec) and offset == 0:
        return Band(left, right, bottom_right=False)
    needs_top_left = spec.has("alibi_slopes")
    if (left, right) == (-1, -1) and not needs_top_left:
        return OPEN
    # cuDNN combines its bottom-right mask with none of these.
    if not (needs_top_left or has_score_bias(spec) or spec.meaning.dropout_rate):
        return Band(left, right, bottom_right=True)
    if has_runtime_lengths(spec):
        return None if (left, right) != (-1, -1) else OPEN
    # The same band, counted from the top left. Negative sides are open, so none may become so.
    from_left = left if left < 0 else left - offset
    from_right = right if right < 0 else right + offset
    if (left >= 0 > from_left) or (right >= 0 > from_right):
        return None
    return Band(from_left, from_right, bottom_right=False)


def has_nodes(spec: AttentionSpec) -> bool:
    """Whether something becomes of scores that cuDNN is told as nodes."""
    return (
        bool(spec.meaning.mods)
        or spec.meaning.logits_soft_cap is not None
        or spec.has("alibi_slopes")
    )


def nodes_of(spec: AttentionSpec, *, packed: bool) -> KernelProgram | str:
    """What becomes of scores as cuDNN is told of it, or why it cannot be.

    Args:
      packed: whether arrays go packed; else what is padding in them goes as 0.
    """
    (left, right), offset = spec.band, _offset(spec)
    left = None if left is None else left - offset
    right = None if right is None else right + offset
    pairs = Pairs(
        lengths=_longest(spec),
        first_row=leading_padding_rows(spec),
        band=(left, right),
        has_runtime_lengths=has_runtime_lengths(spec),
        has_runtime_diagonal=spec.meaning.causal_alignment == "bottom_right"
        and has_runtime_lengths(spec),
        is_padding_zero=not packed,
    )
    program = kernel_program(score_rules_of(spec), pairs, is_backward=spec.is_backward)
    if isinstance(program, str):
        return program
    if reason := _beyond_a_graph(program):
        return reason
    shorter = without_factor(program)
    return shorter if is_normal(positive_scale(spec) * shorter.factor) else program


def _beyond_a_graph(program: KernelProgram) -> str:
    nodes = sum(len(x.split(";")) for x in (program.forward, program.backward) if x)
    arrays = len(program.arrays)
    for count, what, most in (
        (nodes, "operations", MAX_NODES),
        (arrays, "arrays", MAX_NODE_ARRAYS),
    ):
        if count > most:
            return f"mods: {count:,} {what}, and a graph of cuDNN's holds at most {most}"
    return ""


def score_rules_of(spec: AttentionSpec) -> ScoreRules:
    """What becomes of the scores of a call, but for its bias, lengths and band."""
    alibi = None
    if spec.has("alibi_slopes"):
        right = spec.band[1]
        alibi = Alibi(_offset(spec), is_one_sided=right is not None and right <= 0)
    return ScoreRules(
        spec.meaning.logits_soft_cap, spec.meaning.score_mod, alibi, spec.meaning.mask_mod
    )


def _offset(spec: AttentionSpec) -> int:
    """The key that query 0 of full rows lines up with."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    return spec.seq_len_kv - spec.seq_len_q if is_bottom_right else 0


def node_array_extents(spec: AttentionSpec, call: CudnnCall, array: NodeArray) -> Extents:
    """Batch, heads, rows and keys of an array that nodes read, 1 where it is the same for all."""
    axes = array.axes
    if isinstance(array, XlaArray) and spec.shape("mods_start")[0] > 1:
        axes += "bt"  # An array of batch rows alone it does not read right: programs/nodes.py.
    extents = {"b": call.batch, "n": call.num_heads, "t": call.seq_len_q, "s": call.seq_len_kv}
    b, n, t, s = (extents[x] if x in axes else 1 for x in "bnts")
    return b, n, t, s


def _with_nodes(spec: AttentionSpec, call: CudnnCall) -> CudnnCall:
    """The call with its nodes, and what they read."""
    nodes, rules = nodes_of(spec, packed=call.is_packed), score_rules_of(spec)
    if isinstance(nodes, str):
        raise ValueError(f"expected mods that cuDNN can be told of: {nodes}")
    arrays = []
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


def _longest(spec: AttentionSpec) -> tuple[int, int]:
    """The queries, those that are cut off among them, and the keys of the longest sequence."""
    longest_q, longest_kv = spec.meaning.max_seq_lens or (spec.seq_len_q, spec.seq_len_kv)
    return min(longest_q, spec.seq_len_q), min(longest_kv, spec.seq_len_kv)


def _call(spec: AttentionSpec, *, packed: bool) -> CudnnCall:
    band = band_of(spec)
    if band is None:
        raise ValueError(f"expected a band that cuDNN has, got that of {spec}")
    padding = leading_padding_rows(spec)
    rows_q = spec.seq_len_q - padding
    longest_q, longest_kv = _longest(spec)
    multiple = _PACKED_HEAD_DIM_MULTIPLE if packed else _HEAD_DIM_MULTIPLE
    extra_columns = lse_grad.COLUMNS if spec.has("lse_grad") else 0
    bias_batch, bias_heads, bias_rows = _bias_extents(spec, rows_q)
    batch = spec.batch * (most_sequences(spec) or 1)
    forward = not spec.is_backward
    # cudnn-frontend sizes its float32 gradients of packed arrays by their strides, and takes the
    # rows of all sequences for those of one head: where heads are first they are too small, and
    # kernels write past them (wrong gradients and illegal instructions, H200, 9.19).
    is_either = forward or not packed
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
        has_lengths=packed or has_runtime_lengths(spec),
        packed_rows_q=spec.batch * rows_q if packed else 0,
        packed_rows_kv=spec.batch * spec.seq_len_kv if packed else 0,
        head_rows_q=rows_q if spec.meaning.heads_first_q and is_either else 0,
        head_rows_kv=_key_rows(spec) if spec.meaning.heads_first_kv and is_either else 0,
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
        # What lse is follows from the row's maximum and sum.
        needs_lse=forward and spec.wanted.needs_lse and not spec.wanted.needs_max,
        needs_max=forward and spec.wanted.needs_max,
        needs_keep=forward and spec.wanted.needs_keep,
        deterministic=spec.meaning.deterministic_backward,
        needs_dbias="bias" in spec.wanted.gradients,
        clears_rows=has_runtime_lengths(spec) and not spec.promises.ignores_dead_rows,
    )
    return _with_nodes(spec, call) if has_nodes(spec) else call


def _key_rows(spec: AttentionSpec) -> int:
    """Of a batch row, or of a page."""
    return spec.page_size if spec.is_paged else spec.seq_len_kv


def _bias_dtype(spec: AttentionSpec) -> str:
    if not has_score_bias(spec):
        return ""
    # 0 and -inf, all that a mask needs, are the same in every dtype.
    is_own = not spec.has("bias") or spec.dtype_of("bias") == spec.dtype
    return spec.dtype if is_own else "float32"


def _bias_extents(spec: AttentionSpec, rows_q: int) -> tuple[int, int, int]:
    """Batch, heads and rows of the one array that bias and mask make."""
    shapes = [spec.shape(name)[:3] for name in ("bias", "mask") if spec.has(name)]
    if not shapes:
        return 1, 1, 1
    batch, heads, rows = (max(extents) for extents in zip(*shapes, strict=True))
    return batch, heads, rows_q if rows > 1 else 1
