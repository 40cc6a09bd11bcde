"""The limits of AITER's ASM kernels, as one table for both generations.

CK takes the calls that dev18's do not run; later releases are built without CK. The tests compare
the table with the dispatch of each generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attn_dispatch import settings
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import Release, Version, text_of
from attn_dispatch.aiter.rules import (
    ADAPTER,
    ARCHS,
    DEFECTS,
    DISPATCH,
    OVER_GRID,
    OVER_INT32,
    PYTHON,
    KernelRule,
)
from attn_dispatch.aiter.sizes import MOST_BYTES_OF_A_ROW, over_4_gib
from attn_dispatch.semantics.common_rules import DTYPE

_DEV18, _LATER = ("dev18",), ("v0.1.15",)
_PADDED = "or narrower ones padded to these, got ({head_dim}, {head_dim_v})"
"""The end of sentences where CK is not built: widths.py pads head dims there."""

_QUERIES_OF_A_TILE, _KEYS_OF_A_TILE, _FIRST_TILES = 16, 192, 4  # of ASM's backward for windows
_BOTH, _GFX942, _GFX950 = ARCHS, ("gfx942",), ("gfx950",)
_DIMS = "({head_dim}, {head_dim_v})"
_WINDOW = "window ({window_left}, {window_right})"


def _head_dims(call: AiterCall) -> tuple[int, int]:
    return call.head_dim, call.head_dim_v


def _equal_and_within(call: AiterCall, low: int, high: int) -> bool:
    return call.head_dim == call.head_dim_v and low <= call.head_dim <= high


def _top_left_of_unequal(call: AiterCall) -> bool:
    """Whether the diagonal is top-left and differs from the bottom-right one."""
    return call.mask == "top_left" and (call.is_group or call.seq_len_q != call.seq_len_kv)


def _reads_beyond_lse(call: AiterCall) -> bool:
    """Whether a window's kernel reads lse beyond the last query, in any head but the first.

    These kernels move the base of lse and delta by heads and batch rows, not their sizes. For each
    tile of keys they first read four tiles of queries, from the row before the first that its keys
    are seen by.
    """
    if not call.is_window or call.batch * call.num_heads == 1:
        return False
    offset = call.seq_len_kv - call.seq_len_q if call.mask == "bottom_right" else 0
    last_keys = (call.seq_len_kv - 1) // _KEYS_OF_A_TILE * _KEYS_OF_A_TILE
    first = max(0, last_keys - offset - call.window_right - 1 if call.window_right >= 0 else 0)
    first_tiles_end = (first // _QUERIES_OF_A_TILE + _FIRST_TILES) * _QUERIES_OF_A_TILE
    return call.seq_len_q % _QUERIES_OF_A_TILE != 0 or first_tiles_end > call.seq_len_q


def _fewer_rows(call: AiterCall) -> str:
    """The remedy if one batch row's arrays are small enough: calls of fewer rows."""
    fits = not call.is_group and not over_4_gib(replace(call, batch=1))
    return "split the batch into several calls" if fits else ""


def _bottom_right(call: AiterCall) -> str:
    """The remedy for packed sequences: bottom-right alignment. Calls on whole rows have none: they
    break the rule only if their lengths differ, and then the alignments do too."""
    same = 'pass causal_alignment="bottom_right" if every sequence has as many keys as queries'
    return f"{same}: the diagonals are then the same" if call.is_group else ""


_KEYS_OF_A_BLOCK = 256  # of gfx950's causal backward kernels
_ADDS_ONCE = "aiter/ops/mha.py: is_950_1block"
_LAST_BITS = "leave out deterministic_backward if gradients may differ in their last bits"


def _is_128(call: AiterCall) -> bool:
    return _equal_and_within(call, 65, 128)


def _writes_beyond_keys(call: AiterCall) -> bool:
    """Whether the second or a later tile of keys ends beyond the last key.

    Where the lengths are equal, the adapter asks for the other diagonal's kernel.
    """
    keys = call.seq_len_kv
    is_bottom_right = call.is_causal and call.mask == "bottom_right" and not call.is_group
    ends_beyond = keys > _KEYS_OF_A_BLOCK and keys % _KEYS_OF_A_BLOCK != 0
    return is_bottom_right and _is_128(call) and ends_beyond and call.seq_len_q != keys


def _has_one_block(call: AiterCall) -> bool:
    """Whether each element of a gradient is added to once."""
    return _is_128(call) and not call.is_group and call.seq_len_kv <= _KEYS_OF_A_BLOCK


BEYOND_KEYS = KernelRule(
    "aiter/asm_backward_beyond_keys", "backward", _GFX950, _writes_beyond_keys,
    f"backward with a bottom-right mask and {{seq_len_kv}} keys: the kernel writes beyond the last "
    f"one where they are more than {_KEYS_OF_A_BLOCK} and no multiple of it",
    "docs/proof.md; tests/cdna/test_v0_1_15.py", generations=_LATER,
)  # fmt: skip
"""v0.1.15 to v0.1.20: the tile's offset is added to the buffer's base and its size left as it is,
so that no store is out of range."""

ONE_QUERY = KernelRule(
    "aiter/asm_backward_one_query", "backward", _GFX950,
    lambda c: not c.is_group and c.seq_len_q == 1 < c.batch
    and (c.head_dim == c.head_dim_v or c.mask == "bottom_right"),
    "backward with 1 query and {batch} batch rows: the kernel takes the batch rows for queries, "
    "and reads past the last one",
    "tests/cdna/test_v0_1_15.py", generations=_LATER,
)  # fmt: skip
"""The kernel takes arrays for [queries, batch, …] if the stride of queries is no less than that of
batch rows. Then NUM_RECORDS has the batch row's offset subtracted, and wraps."""

ASM_RULES = (
    KernelRule("aiter/asm_off", "both", _BOTH, lambda c: not settings.current().aiter_asm,
        f"ASM kernels are switched off ({settings.AITER_ASM}=0)", "docs/settings.md",
        f"unset {settings.AITER_ASM}"),
    KernelRule("aiter/asm_bias", "both", _BOTH,
        lambda c: c.bias == "bias", "no ASM kernel has a bias", DISPATCH),
    KernelRule("aiter/asm_alibi", "both", _BOTH,
        lambda c: c.bias == "alibi", "no ASM kernel has ALiBi", DISPATCH),
    KernelRule("aiter/asm_dropout", "both", _BOTH,
        lambda c: c.dropout_rate > 0, "no ASM kernel has dropout", DISPATCH),
    KernelRule("aiter/asm_gaps", "both", _BOTH, lambda c: c.has_gaps,
        "gaps between packed sequences: ASM takes their lengths as prefix sums alone", ADAPTER,
        "pass the sequences one after the other to ragged_dot_product_attention",
        generations=_DEV18),
    KernelRule("aiter/asm_bytes", "both", _BOTH, lambda c: bool(over_4_gib(c)),
        "4 GiB or more in one array ({arrays}): ASM counts bytes in 32 bits",
        "github.com/ROCm/aiter/pull/1957, github.com/ROCm/aiter/issues/4126", _fewer_rows),
    KernelRule("aiter/asm_row_bytes", "forward", _GFX950,
        lambda c: c.num_heads * max(_head_dims(c)) * 2 > MOST_BYTES_OF_A_ROW,
        f"forward with rows of over {MOST_BYTES_OF_A_ROW >> 20} MiB ({{num_heads}} heads): results "
        "are wrong at 4 MiB", "tests/cdna/test_sparse_memory.py"),

    KernelRule("aiter/asm_dtype", "forward", _BOTH, lambda c: c.dtype != "bfloat16",
        "forward needs bfloat16, got {dtype}", DISPATCH, str(DTYPE.remedy)),
    KernelRule("aiter/asm_head_dims_gfx942", "forward", _GFX942,
        lambda c: _head_dims(c) != (128, 128),
        f"forward needs head dims (128, 128), got {_DIMS}", DISPATCH, generations=_DEV18),
    KernelRule("aiter/asm_head_dims_gfx950", "forward", _GFX950,
        lambda c: _head_dims(c) not in ((128, 128), (192, 128)),
        f"forward needs head dims (128, 128), got {_DIMS}", DISPATCH, generations=_DEV18),
    KernelRule("aiter/asm_head_dims_gfx950", "forward", _BOTH,
        lambda c: _head_dims(c) not in ((128, 128), (192, 128)),
        f"forward needs head dims (128, 128) or (192, 128), {_PADDED}", DISPATCH,
        generations=_LATER),
    KernelRule("aiter/asm_192_barrier", "forward", _GFX950,
        lambda c: _head_dims(c) == (192, 128),
        f"forward with head dims {_DIMS}: ASM's kernel lacks a barrier", DEFECTS,
        generations=_DEV18),
    KernelRule("aiter/asm_window", "forward", _BOTH,
        lambda c: c.is_window, f"forward with a {_WINDOW}", DISPATCH),
    KernelRule("aiter/asm_top_left", "forward", _BOTH, _top_left_of_unequal,
        "forward with a top-left diagonal where lengths differ or sequences are packed", DISPATCH,
        _bottom_right),
    KernelRule("aiter/asm_soft_cap", "forward", _BOTH, lambda c: c.logits_soft_cap > 0,
        "ASM would ignore logits_soft_cap", "no field of fmha_fwd_v3_args has it",
        generations=_DEV18),
    KernelRule("aiter/asm_soft_cap", "forward", _BOTH, lambda c: c.logits_soft_cap > 0,
        "ASM would ignore logits_soft_cap", DISPATCH, generations=_LATER),
    KernelRule("aiter/asm_few_queries", "forward", _BOTH,
        lambda c: not c.is_group and c.seq_len_q <= 128,
        "forward with {seq_len_q} queries: CK is preferred up to 128", PYTHON, generations=_DEV18),

    KernelRule("aiter/asm_deterministic", "backward", _BOTH, lambda c: c.deterministic,
        "deterministic: ASM adds with atomics", DISPATCH,
        _LAST_BITS, generations=_DEV18),
    KernelRule("aiter/asm_backward_head_dims_gfx942", "backward", _GFX942,
        lambda c: not _equal_and_within(c, 64, 192),
        f"backward needs equal head dims from 64 to 192, got {_DIMS}", DISPATCH,
        generations=_DEV18),
    KernelRule("aiter/asm_backward_head_dims_gfx942", "backward", _GFX942,
        lambda c: not _equal_and_within(c, 64, 192),
        f"backward needs equal head dims from 64 to 192, {_PADDED}", DISPATCH, generations=_LATER),
    KernelRule("aiter/asm_backward_head_dims_gfx950", "backward", _GFX950,
        lambda c: not _equal_and_within(c, 64, 192) and _head_dims(c) != (192, 128),
        "backward needs equal head dims from 72 to 128, or (192, 128) without packing, got "
        f"{_DIMS}",
        DISPATCH, generations=_DEV18),
    KernelRule("aiter/asm_backward_head_dims_gfx950", "backward", _GFX950,
        lambda c: not _equal_and_within(c, 64, 192) and _head_dims(c) != (192, 128),
        f"backward needs equal head dims from 72 to 128, or (192, 128) without packing, {_PADDED}",
        DISPATCH, generations=_LATER),
    KernelRule("aiter/asm_backward_narrow_gfx950", "backward", _GFX950,
        lambda c: _equal_and_within(c, 64, 192) and not 64 < c.head_dim <= 128,
        f"backward with head dims {_DIMS}: on gfx950 AITER takes ASM for equal ones only from 72 "
        "to 128",
        PYTHON),
    KernelRule("aiter/asm_backward_packed_gfx942", "backward", _GFX942, lambda c: c.is_group,
        "backward of packed sequences: AITER reads their ends on the host, possibly before the "
        "device has computed them",
        "fmha_bwd_v3_group_ of hsa/gfx942/fmha_v3_bwd/codegen.py", generations=_DEV18),
    KernelRule("aiter/asm_backward_192_bottom_right", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.mask == "bottom_right",
        f"backward with head dims {_DIMS} and a bottom-right mask", DISPATCH, generations=_DEV18),
    KernelRule("aiter/asm_backward_192_top_left", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.mask == "top_left",
        f"backward with head dims {_DIMS} and a top-left mask", PYTHON, generations=_DEV18),
    KernelRule("aiter/asm_backward_192_packed", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.is_group,
        f"backward of packed sequences with head dims {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_backward_packed_window", "backward", _BOTH,
        lambda c: c.is_window and c.is_group,
        f"backward of packed sequences with a {_WINDOW}", DISPATCH),
    KernelRule("aiter/asm_backward_window_head_dims", "backward", _BOTH,
        lambda c: c.is_window and not _equal_and_within(c, 65, 128),
        f"backward with a {_WINDOW} needs equal head dims from 72 to 128, got {_DIMS}", DISPATCH,
        generations=_DEV18),
    KernelRule("aiter/asm_backward_window_head_dims", "backward", _BOTH,
        lambda c: c.is_window and not _equal_and_within(c, 65, 128),
        f"backward with a {_WINDOW} needs equal head dims from 72 to 128, {_PADDED}", DISPATCH,
        generations=_LATER),
    KernelRule("aiter/asm_backward_closed_window", "backward", _BOTH,
        lambda c: c.is_window and c.window_left <= 0 and c.window_right <= 0,
        f"backward with a {_WINDOW}", DISPATCH, generations=_DEV18),
    KernelRule("aiter/asm_backward_window_gfx950", "backward", _GFX950,
        lambda c: c.is_window,
        f"backward with a {_WINDOW}: gives NaN now and then on gfx950",
        "github.com/ROCm/aiter/pull/816", generations=_DEV18),
    KernelRule("aiter/asm_backward_window_gfx950", "backward", _GFX950,
        lambda c: c.is_window, "backward with a window", DISPATCH, generations=_LATER),
    KernelRule("aiter/asm_backward_window_rows", "backward", _GFX942, _reads_beyond_lse,
        f"backward with a {_WINDOW}, {{seq_len_q}} queries and {{seq_len_kv}} keys: ASM reads lse "
        "beyond the last row, and gives NaN if NaN is there",
        "tests/cdna/test_attention.py"),
    KernelRule("aiter/asm_backward_few_queries", "backward", _BOTH,
        lambda c: not c.is_group and c.seq_len_q <= 16,
        "backward with {seq_len_q} queries: CK is preferred up to 16", PYTHON, generations=_DEV18),

    BEYOND_KEYS,
    ONE_QUERY,
    # dev18's rules need no such row: those of CK refuse the gradient for ASM too.
    KernelRule("aiter/asm_soft_cap_gradient", "backward", _BOTH,
        lambda c: c.logits_soft_cap > 0, "no kernel computes the gradient under logits_soft_cap",
        "no field of mha_bwd_args has it", generations=_LATER),
    # One block of keys adds to each element once. AITER's Python then takes a kernel that adds in
    # 16 bits; that of 32 bits adds as often.
    KernelRule("aiter/asm_deterministic", "backward", _GFX942, lambda c: c.deterministic,
        "deterministic: ASM adds with atomics", _ADDS_ONCE, _LAST_BITS, generations=_LATER),
    KernelRule("aiter/asm_deterministic_gfx950", "backward", _GFX950,
        lambda c: c.deterministic and not _has_one_block(c),
        "deterministic: ASM adds with atomics where keys are packed, more than "
        f"{_KEYS_OF_A_BLOCK}, or head dims not equal ones from 72 to 128",
        _ADDS_ONCE, _LAST_BITS, generations=_LATER),
    replace(OVER_INT32, generations=_LATER),
    replace(OVER_GRID, generations=_LATER),
)  # fmt: skip
"""The calls that ASM kernels do not run. Grouped heads are no obstacle.

A row has a remedy if the caller can get the same results, up to rounding, in another way. So a
bias, a window and head dims have none, and nor has a preference of AITER's for CK.
"""

DOUBTS = (
    KernelRule("aiter/asm_192_barrier", "forward", _GFX950,
        lambda c: _head_dims(c) == (192, 128),
        "AITER's ASM kernel for head dims (192, 128) on gfx950 lacks a barrier, so that its "
        "results would be wrong if one wave fell far behind another. No GPU is known to have shown "
        "it", DEFECTS, "`with attn_dispatch.aiter_asm(False):` computes the call with XLA"),
)  # fmt: skip
"""The calls that run on ASM with a warning."""

DQ_IS_STORED_EARLY = _GFX942
"""Where the kernel of later releases that rounds the gradient of query stores its results with no
wait for them."""

_BEFORE: tuple[tuple[Version, str, str, str, Callable[[AiterCall], bool]], ...] = (
    ((0, 1, 18), "gfx950", "forward with head dims (192, 128)", "github.com/ROCm/aiter/pull/4239",
     lambda c: not c.backward and _head_dims(c) == (192, 128)),
)  # fmt: skip
"""What is wrong before a version: the version, the architecture, the calls and the correction."""


def rules_of(release: Release) -> tuple[KernelRule, ...]:
    """The rules of a release: those of its generation, and what is wrong in its version."""
    rows = tuple(x for x in ASM_RULES if release.generation in x.generations)
    older = (
        KernelRule(f"aiter/asm_before_{text_of(since)}", "both", (arch,), applies,
            f"{what}: wrong in AITER {text_of(release.version)}, right since {text_of(since)}",
            source, f"build AITER {text_of(since)} or newer")
        for since, arch, what, source, applies in _BEFORE
        if not release.has_ck and release.version < since
    )  # fmt: skip
    return (*rows, *older)


def lacks(version: Version, arch: str) -> list[str]:
    """What a version does not run on an architecture and newer ones do."""
    return [
        f"{what} needs AITER {text_of(since)} or newer"
        for since, on, what, _, _ in _BEFORE
        if on == arch and version < since
    ]
