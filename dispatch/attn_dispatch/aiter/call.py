"""One attention call in AITER's terms, by which its kernel is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from attn_dispatch.aiter.release import Release
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.wider_arrays import round_up

HEAD_DIM_MULTIPLE = 8
"""AITER's kernels take multiples of it; other head dims are padded."""

MAX_SPLIT_QUERIES = 8
"""The most queries of a row for which keys with lengths are split among workgroups."""

Mask = Literal["none", "top_left", "bottom_right"]
Bias = Literal["none", "bias", "alibi"]


@dataclass(frozen=True)
class AiterCall:
    """A forward or backward call as AITER takes it: padded head dims, masks in AITER's form.

    In group mode (packed sequences) `batch` counts sequences, `seq_len_*` are the rows of the
    packed arrays and `max_seq_len_*` the longest sequence. Otherwise `max_seq_len_*` equal
    `seq_len_*`.
    """

    backward: bool
    dtype: str
    """"float16" or "bfloat16"."""
    is_group: bool
    has_gaps: bool
    """Group mode: whether sequences may be shorter than the space up to the next one."""
    batch: int
    seq_len_q: int
    seq_len_kv: int
    max_seq_len_q: int
    max_seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    """The corner where the diagonal starts; "none" if both sides of the window are open."""
    window_left: int
    """Keys to the left of the diagonal that a query sees; -1 is open. Causal is (-1, 0)."""
    window_right: int
    bias: Bias
    has_dbias: bool
    """Backward: whether the gradient of the bias is wanted."""
    logits_soft_cap: float
    """0 means none."""
    dropout_rate: float
    deterministic: bool
    needs_lse: bool
    """Forward: whether lse is wanted."""
    is_split: bool = False
    """Forward: whether the split-KV kernels run the call, which read keys up to each row's length.

    If `folds_heads` is true of the spec, `num_heads` counts kv heads, and `seq_len_q` counts the
    query heads of each as rows.
    """
    page_size: int = 0
    """Split-KV: the keys in a page; 0 if keys are not in pages."""
    num_pages: int = 0
    """Split-KV: the pages of keys; the values of a page are `value_page` pages further on."""
    value_page: int = 0
    heads_first_kv: bool = False
    """Split-KV: whether a page, or a batch row, has its heads before its keys."""

    @property
    def is_causal(self) -> bool:
        return (self.window_left, self.window_right) == (-1, 0)

    @property
    def is_window(self) -> bool:
        """Whether the mask is more than a causal one."""
        return self.mask != "none" and not self.is_causal


def call_of(spec: AttentionSpec) -> AiterCall:
    """The call in AITER's terms."""
    return _split_call(spec) if is_split(spec) else _whole_call(spec)


def _whole_call(spec: AttentionSpec) -> AiterCall:
    mask, left, right = _mask(spec)
    sequences = _sequences(spec)
    is_group = sequences is not None
    rows = spec.batch if is_group else 1
    return AiterCall(
        backward=spec.is_backward,
        dtype=spec.dtype,
        is_group=is_group,
        # Without gaps there is one batch row, in which each sequence ends where the next starts.
        has_gaps=is_group and not (spec.has("cu_seqlens_q") and spec.batch == 1),
        batch=spec.batch * (sequences or 1),
        seq_len_q=rows * spec.seq_len_q,
        seq_len_kv=rows * spec.seq_len_kv,
        max_seq_len_q=spec.longest_sequences[0],
        max_seq_len_kv=spec.longest_sequences[1],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=round_up(spec.head_dim, HEAD_DIM_MULTIPLE),
        head_dim_v=round_up(spec.head_dim_v + _lse_grad_columns(spec), HEAD_DIM_MULTIPLE),
        mask=mask,
        window_left=left,
        window_right=right,
        bias=_bias(spec),
        has_dbias="bias" in spec.wanted.gradients,
        logits_soft_cap=spec.meaning.logits_soft_cap or 0.0,
        dropout_rate=spec.meaning.dropout_rate,
        deterministic=spec.meaning.deterministic_backward and spec.is_backward,
        needs_lse=spec.wanted.needs_lse and not spec.is_backward,
    )


def is_split(spec: AttentionSpec) -> bool:
    """Whether split-KV kernels run the call: keys in pages, or few queries and a cache."""
    if spec.is_backward or spec.is_packed or spec.meaning.dropout_rate:
        return False
    if not spec.has("key_value_seq_lengths"):
        return False
    return spec.is_paged or (spec.seq_len_q <= MAX_SPLIT_QUERIES and not spec.has("bias"))


def folds_heads(spec: AttentionSpec) -> bool:
    """Whether the query heads of a kv head become rows of one tile, for which keys are read once.

    CK's tile has 64 rows of one head, most of them unused with few queries. A mask depends on the
    row, and ALiBi, whose slopes depend on the head, comes with a mask: then heads cannot be rows.
    """
    return _split_mask(spec)[0] == "none"


def _split_call(spec: AttentionSpec) -> AiterCall:
    mask, left, right = _split_mask(spec)
    folded = spec.num_heads // spec.num_kv_heads if folds_heads(spec) else 1
    rows, keys = folded * spec.seq_len_q, spec.seq_len_kv
    return replace(
        _whole_call(spec),
        # Lengths of keys are given as they are, and rows are whole.
        is_group=False,
        has_gaps=False,
        batch=spec.batch,
        seq_len_q=rows,
        seq_len_kv=keys,
        max_seq_len_q=rows,
        max_seq_len_kv=keys,
        num_heads=spec.num_heads // folded,
        mask=mask,
        window_left=left,
        window_right=right,
        is_split=True,
        page_size=spec.page_size if spec.is_paged else 0,
        num_pages=_pages(spec) if spec.is_paged else 0,
        value_page=spec.meaning.value_page,
        heads_first_kv=spec.meaning.heads_first_kv,
    )


def _pages(spec: AttentionSpec) -> int:
    return math.prod(spec.shape("key_pages")[:2]) - spec.meaning.value_page


def _split_mask(spec: AttentionSpec) -> tuple[Mask, int, int]:
    """`_mask`, or no mask if it hides nothing from a single query, the last of its row."""
    mask, left, right = _mask(spec)
    is_last = spec.seq_len_q == 1 and mask == "bottom_right"
    if is_last and left == -1:
        return "none", -1, -1
    return mask, left, right


def _sequences(spec: AttentionSpec) -> int | None:
    """The number of sequences in a batch row; None if batch rows are whole, without lengths."""
    if spec.is_packed:
        return spec.most_sequences or 1  # if the number is unknown, another rule refuses the call
    return 1 if spec.has_lengths else None


def _lse_grad_columns(spec: AttentionSpec) -> int:
    return lse_grad.COLUMNS if spec.has("lse_grad") else 0


def _mask(spec: AttentionSpec) -> tuple[Mask, int, int]:
    """The corner where the diagonal starts, and the window (left, right) around it; -1 is open."""
    left, right = (-1 if side is None else side for side in spec.band)
    if spec.has("alibi_slopes") or spec.has("bias"):
        # A window that hides nothing. Only with a window does CK count ALiBi's distances from the
        # diagonal: without a mask they count from the bottom right, and with (-1, 0) from the first
        # key, which changes lse. And only with a mask does CK handle a row of biases all -inf.
        wide = spec.seq_len_q + spec.seq_len_kv
        left, right = (wide if side < 0 else side for side in (left, right))
    if (left, right) == (-1, -1):
        return "none", -1, -1
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    return "bottom_right" if is_bottom_right else "top_left", left, right


def _bias(spec: AttentionSpec) -> Bias:
    if spec.has("alibi_slopes"):
        return "alibi"
    return "bias" if spec.has("bias") else "none"


_FORWARD = ((128, 128), (192, 128))
_LEAST = {"gfx942": 64, "gfx950": 72}
"""The least head dim of backward kernels. They run every multiple of 8 up to the most."""
_MOST = {"gfx942": 192, "gfx950": 128}
_OF_WINDOWS = 72, 128


def call_for(spec: AttentionSpec, arch: str, release: Release) -> AiterCall:
    """The call in AITER's terms, for the kernels that are built."""
    call = widened(call_of(spec), arch, release)
    is_same_diagonal = call.is_group and spec.meaning.same_lengths and call.mask == "top_left"
    return replace(call, mask="bottom_right") if is_same_diagonal and not release.has_ck else call


def widened(call: AiterCall, arch: str, release: Release) -> AiterCall:
    """The call with the least head dims that an ASM kernel has, where ASM kernels alone are built;
    unchanged if none is so wide."""
    if release.has_ck or call.is_split or arch not in _LEAST:
        return call
    kernels = _backward(call, arch) if call.backward else _FORWARD
    fits = (x for x in kernels if x[0] >= call.head_dim and x[1] >= call.head_dim_v)
    head_dim, head_dim_v = next(fits, (call.head_dim, call.head_dim_v))
    return replace(call, head_dim=head_dim, head_dim_v=head_dim_v)


def _backward(call: AiterCall, arch: str) -> tuple[tuple[int, int], ...]:
    """The head dims of kernels for the call, the narrowest first."""
    least, most = _OF_WINDOWS if call.is_window else (_LEAST[arch], _MOST[arch])
    equal = max(call.head_dim, call.head_dim_v, least)
    kernels = ((equal, equal),) if equal <= most else ()
    return (*kernels, (192, 128)) if arch == "gfx950" and not call.is_group else kernels
