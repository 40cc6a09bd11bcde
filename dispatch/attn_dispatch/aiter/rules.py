"""The limits of AITER's kernels, generation "dev18", as three tables: ASM, CK, and CK's split-KV.

A row is a name, a condition and a sentence. If its `source` is DISPATCH or CK, AITER's C++ refuses
the call too. All other rows are stricter than AITER's C++, and name the source of the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from string import Formatter

from attn_dispatch import settings
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.sizes import (
    FOUR_GIB,
    MAX_GRID_SIZE,
    MOST_BYTES_OF_A_ROW,
    dq_acc_bytes,
    over_4_gib,
    over_grid,
    over_int32,
)
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.common_rules import DTYPE

ARCHS = ("gfx942", "gfx950")

DISPATCH = "hsa/gfx*/fmha_v3_*/codegen.py"
CK = "example/ck_tile/01_fmha/codegen"
PYTHON = "aiter/ops/mha.py"
HOST = "csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu"
ADAPTER = "rocm_backend/aiter_adapter.h"
DEFECTS = "docs/aiter_defects.md"


@dataclass(frozen=True)
class KernelRule:
    """A row: on these archs, calls of this direction do not run if `applies` is true."""

    name: str
    direction: str
    """"forward", "backward" or "both"."""
    archs: tuple[str, ...]
    applies: Callable[[AiterCall], bool]
    text: str
    """The sentence, with facts in braces: fields of the call or entries of `_COUNTED`."""
    source: str
    remedy: str | Callable[[AiterCall], str] = ""
    """One remedy for all calls that break the rule, or a function of the call."""

    def is_broken_by(self, call: AiterCall, arch: str) -> bool:
        of_direction = self.direction in ("both", "backward" if call.backward else "forward")
        return of_direction and arch in self.archs and self.applies(call)

    def reason(self, call: AiterCall) -> Reason:
        """The reason for a call that breaks the rule. Its facts are those in the sentence."""
        names = [name for _, name, _, _ in Formatter().parse(self.text) if name]
        facts = {x: _COUNTED[x](call) if x in _COUNTED else getattr(call, x) for x in names}
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(call)
        return Reason(self.name, tuple(facts.items()), self.text.format(**facts), remedy)


_COUNTED: dict[str, Callable[[AiterCall], str | int]] = {
    "arrays": lambda call: ", ".join(over_4_gib(call)),
    "dq_bytes": dq_acc_bytes,
    "axes": lambda call: ", ".join(over_int32(call)),
    "layers": lambda call: ", ".join(over_grid(call)),
}


_QUERIES_OF_A_TILE, _KEYS_OF_A_TILE, _FIRST_TILES = 16, 192, 4  # of ASM's backward for windows
_BOTH, _GFX942, _GFX950 = ARCHS, ("gfx942",), ("gfx950",)


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


OVER_GRID = KernelRule("aiter/grid", "both", _BOTH, lambda c: bool(over_grid(c)),
    f"{{layers}}: an AMD GPU's grid has at most {MAX_GRID_SIZE} workgroups along an axis",
    "maxGridSize of hipamd/src/hip_device.cpp in github.com/ROCm/clr; sizes.over_grid",
)  # fmt: skip
"""hipModuleLaunchKernel refuses a larger grid, and AITER then aborts the process."""

OVER_INT32 = KernelRule("aiter/int32", "both", _BOTH, lambda c: bool(over_int32(c)),
    "strides over 2**31 - 1 elements ({axes}): AITER counts elements in 32 bits",
    "fmha_fwd_args and fmha_bwd_args",
)  # fmt: skip

_DIMS = "({head_dim}, {head_dim_v})"
_WINDOW = "window ({window_left}, {window_right})"

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
        "pass the sequences one after the other to ragged_dot_product_attention"),
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
        f"forward needs head dims (128, 128), got {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_head_dims_gfx950", "forward", _GFX950,
        lambda c: _head_dims(c) not in ((128, 128), (192, 128)),
        f"forward needs head dims (128, 128), got {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_192_barrier", "forward", _GFX950,
        lambda c: _head_dims(c) == (192, 128),
        f"forward with head dims {_DIMS}: ASM's kernel lacks a barrier", DEFECTS),
    KernelRule("aiter/asm_window", "forward", _BOTH,
        lambda c: c.is_window, f"forward with a {_WINDOW}", DISPATCH),
    KernelRule("aiter/asm_top_left", "forward", _BOTH, _top_left_of_unequal,
        "forward with a top-left diagonal where lengths differ or sequences are packed", DISPATCH,
        _bottom_right),
    KernelRule("aiter/asm_soft_cap", "forward", _BOTH, lambda c: c.logits_soft_cap > 0,
        "ASM would ignore logits_soft_cap", "no field of fmha_fwd_v3_args has it"),
    KernelRule("aiter/asm_few_queries", "forward", _BOTH,
        lambda c: not c.is_group and c.seq_len_q <= 128,
        "forward with {seq_len_q} queries: CK is preferred up to 128", PYTHON),

    KernelRule("aiter/asm_deterministic", "backward", _BOTH, lambda c: c.deterministic,
        "deterministic: ASM adds with atomics", DISPATCH,
        "leave out deterministic_backward if gradients may differ in their last bits"),
    KernelRule("aiter/asm_backward_head_dims_gfx942", "backward", _GFX942,
        lambda c: not _equal_and_within(c, 64, 192),
        f"backward needs equal head dims from 64 to 192, got {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_backward_head_dims_gfx950", "backward", _GFX950,
        lambda c: not _equal_and_within(c, 64, 192) and _head_dims(c) != (192, 128),
        "backward needs equal head dims from 72 to 128, or (192, 128) without packing, got "
        f"{_DIMS}",
        DISPATCH),
    KernelRule("aiter/asm_backward_narrow_gfx950", "backward", _GFX950,
        lambda c: _equal_and_within(c, 64, 192) and not 64 < c.head_dim <= 128,
        f"backward with head dims {_DIMS}: on gfx950 AITER takes ASM for equal ones only from 72 "
        "to 128",
        PYTHON),
    KernelRule("aiter/asm_backward_packed_gfx942", "backward", _GFX942, lambda c: c.is_group,
        "backward of packed sequences: AITER reads their ends on the host, possibly before the "
        "device has computed them",
        "fmha_bwd_v3_group_ of hsa/gfx942/fmha_v3_bwd/codegen.py"),
    KernelRule("aiter/asm_backward_192_bottom_right", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.mask == "bottom_right",
        f"backward with head dims {_DIMS} and a bottom-right mask", DISPATCH),
    KernelRule("aiter/asm_backward_192_top_left", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.mask == "top_left",
        f"backward with head dims {_DIMS} and a top-left mask", PYTHON),
    KernelRule("aiter/asm_backward_192_packed", "backward", _GFX950,
        lambda c: _head_dims(c) == (192, 128) and c.is_group,
        f"backward of packed sequences with head dims {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_backward_packed_window", "backward", _BOTH,
        lambda c: c.is_window and c.is_group,
        f"backward of packed sequences with a {_WINDOW}", DISPATCH),
    KernelRule("aiter/asm_backward_window_head_dims", "backward", _BOTH,
        lambda c: c.is_window and not _equal_and_within(c, 65, 128),
        f"backward with a {_WINDOW} needs equal head dims from 72 to 128, got {_DIMS}", DISPATCH),
    KernelRule("aiter/asm_backward_closed_window", "backward", _BOTH,
        lambda c: c.is_window and c.window_left <= 0 and c.window_right <= 0,
        f"backward with a {_WINDOW}", DISPATCH),
    KernelRule("aiter/asm_backward_window_gfx950", "backward", _GFX950,
        lambda c: c.is_window,
        f"backward with a {_WINDOW}: gives NaN now and then on gfx950",
        "github.com/ROCm/aiter/pull/816"),
    KernelRule("aiter/asm_backward_window_rows", "backward", _GFX942, _reads_beyond_lse,
        f"backward with a {_WINDOW}, {{seq_len_q}} queries and {{seq_len_kv}} keys: ASM reads lse "
        "beyond the last row, and gives NaN if NaN is there",
        "tests/cdna/test_attention.py"),
    KernelRule("aiter/asm_backward_few_queries", "backward", _BOTH,
        lambda c: not c.is_group and c.seq_len_q <= 16,
        "backward with {seq_len_q} queries: CK is preferred up to 16", PYTHON),
)  # fmt: skip
"""The calls that ASM kernels do not run. Grouped heads are no obstacle.

A row has a remedy if the caller can get the same results, up to rounding, in another way. So a
bias, a window and head dims have none, and nor has a preference of AITER's for CK.
"""

CK_RULES = (
    KernelRule("dtype", "both", _BOTH, lambda c: c.dtype not in ("float16", "bfloat16"),
        DTYPE.text, CK, str(DTYPE.remedy)),
    KernelRule("aiter/head_dim", "both", _BOTH, lambda c: max(_head_dims(c)) > 256,
        f"head dims up to 256, got {_DIMS}", CK),
    OVER_INT32,
    OVER_GRID,
    KernelRule("aiter/dq_bytes", "backward", _BOTH, lambda c: dq_acc_bytes(c) >= FOUR_GIB,
        "4 GiB or more of float32 gradients of query, which CK addresses at once: "
        "{dq_bytes:,} bytes",
        "github.com/ROCm/aiter/pull/1873; fmha_bwd_kernel.hpp"),
    KernelRule("aiter/bias_packed", "both", _BOTH, lambda c: c.bias == "bias" and c.is_group,
        "AITER has no bias with packed sequences or lengths",
        "aiter/ops/mha.py takes none in both directions"),
    KernelRule("aiter/soft_cap_bias", "forward", _BOTH,
        lambda c: c.logits_soft_cap > 0 and c.bias != "none",
        "CK has no logits_soft_cap together with bias or ALiBi", CK),
    KernelRule("aiter/inference_head_dims", "forward", _BOTH,
        lambda c: 128 < c.head_dim <= 192 and c.head_dim_v <= 128
        and (c.bias != "none" or c.dropout_rate > 0),
        f"bias, ALiBi or dropout with head dims {_DIMS}: CK built these for inference alone", CK),
    KernelRule("aiter/soft_cap_gradient", "backward", _BOTH, lambda c: c.logits_soft_cap > 0,
        "CK does not compute the gradient under logits_soft_cap",
        "no field of fmha_bwd_args has it"),
)  # fmt: skip
"""The calls that CK does not run, and so no kernel of AITER: ASM runs fewer."""

SPLIT_RULES = (
    KernelRule("dtype", "forward", _BOTH, lambda c: c.dtype not in ("float16", "bfloat16"),
        DTYPE.text, CK, str(DTYPE.remedy)),
    KernelRule("aiter/head_dim", "forward", _BOTH, lambda c: max(_head_dims(c)) > 256,
        f"head dims up to 256, got {_DIMS}", CK),
    KernelRule("aiter/page_size", "forward", _BOTH, lambda c: c.page_size % 128 != 0,
        "key and value in pages of {page_size}: CK's split-KV kernels take multiples of 128",
        HOST, "make pages of 128 or 256 keys"),
    KernelRule("aiter/paged_bias", "forward", _BOTH, lambda c: c.bias == "bias",
        "CK has no bias with keys in pages", HOST),
    KernelRule("aiter/soft_cap_bias", "forward", _BOTH,
        lambda c: c.logits_soft_cap > 0 and c.bias != "none",
        "CK has no logits_soft_cap together with bias or ALiBi", CK),
    KernelRule("aiter/int32", "forward", _BOTH, lambda c: bool(over_int32(c)),
        "strides over 2**31 - 1 elements ({axes}): AITER counts elements in 32 bits",
        "fmha_fwd_splitkv_args"),
    OVER_GRID,
)  # fmt: skip
"""The calls that CK's split-KV kernels do not run."""
