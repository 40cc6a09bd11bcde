"""The limits of the ASM kernels of AITER v0.1.15 and later, as what differs from rules.ASM_RULES.

tests/aiter/test_v0_1_15_rules.py compares them with the dispatch of AITER's sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import Release, Version, text_of
from attn_dispatch.aiter.rules import (
    ASM_RULES,
    DEFECTS,
    DISPATCH,
    OVER_GRID,
    OVER_INT32,
    KernelRule,
)

_NO_LONGER = {
    # Prefix sums of lengths are read beside the starts of sequences.
    "aiter/asm_gaps",
    "aiter/asm_backward_packed_gfx942",
    # There are kernels for these.
    "aiter/asm_head_dims_gfx942",
    "aiter/asm_backward_192_bottom_right",
    "aiter/asm_backward_192_top_left",
    "aiter/asm_backward_closed_window",
    # One block of keys is, on gfx950: SEVERAL_BLOCKS.
    "aiter/asm_deterministic",
    # CK is not there to be preferred.
    "aiter/asm_few_queries",
    "aiter/asm_backward_few_queries",
    # CK is not there to run them instead: a warning (DOUBTS).
    "aiter/asm_192_barrier",
}
_SOURCES = {
    # rocm_backend/aiter_v0_1_15_*.cc refuses it.
    "aiter/asm_soft_cap": DISPATCH,
    # No window has a kernel there any more.
    "aiter/asm_backward_window_gfx950": DISPATCH,
}
_CHANGED = {
    "aiter/asm_head_dims_gfx950": {
        "archs": ("gfx942", "gfx950"),
        "text": "forward needs head dims (128, 128) or (192, 128), got ({head_dim}, {head_dim_v})",
    },
    "aiter/asm_backward_window_gfx950": {"text": "backward with a window"},
}


_PADDED = {
    # Where CK is not built, widths.py pads narrower head dims.
    "aiter/asm_head_dims_gfx950",
    "aiter/asm_backward_head_dims_gfx942",
    "aiter/asm_backward_head_dims_gfx950",
    "aiter/asm_backward_window_head_dims",
}


def _changed(rule: KernelRule) -> KernelRule:
    source = _SOURCES.get(rule.name, rule.source)
    changed = replace(rule, source=source, **_CHANGED.get(rule.name, {}))
    if rule.name not in _PADDED:
        return changed
    text = changed.text.replace(", got ", ", or narrower ones padded to these, got ")
    return replace(changed, text=text)


_KEYS_OF_A_TILE = 256  # of gfx950's causal backward kernels


def _writes_beyond_keys(call: AiterCall) -> bool:
    """Whether the second or a later tile of keys ends beyond the last key.

    Where the lengths are equal, the adapter asks for the other diagonal's kernel.
    """
    keys = call.seq_len_kv
    is_bottom_right = call.is_causal and call.mask == "bottom_right" and not call.is_group
    is_128 = call.head_dim == call.head_dim_v and 64 < call.head_dim <= 128
    ends_beyond = keys > _KEYS_OF_A_TILE and keys % _KEYS_OF_A_TILE != 0
    return is_bottom_right and is_128 and ends_beyond and call.seq_len_q != keys


BEYOND_KEYS = KernelRule(
    "aiter/asm_backward_beyond_keys", "backward", ("gfx950",), _writes_beyond_keys,
    f"backward with a bottom-right mask and {{seq_len_kv}} keys: the kernel writes beyond the last "
    f"one where they are more than {_KEYS_OF_A_TILE} and no multiple of it",
    "docs/proof.md; tests/cdna/test_v0_1_15.py",
)  # fmt: skip
"""v0.1.15 to v0.1.20: the tile's offset is added to the buffer's base and its size left as it is,
so that no store is out of range."""

ONE_QUERY = KernelRule(
    "aiter/asm_backward_one_query", "backward", ("gfx950",),
    lambda c: not c.is_group and c.seq_len_q == 1 < c.batch
    and (c.head_dim == c.head_dim_v or c.mask == "bottom_right"),
    "backward with 1 query and {batch} batch rows: the kernel takes the batch rows for queries, "
    "and reads past the last one",
    "tests/cdna/test_v0_1_15.py",
)  # fmt: skip
"""The kernel takes arrays for [queries, batch, …] if the stride of queries is no less than that of
batch rows. Then NUM_RECORDS has the batch row's offset subtracted, and wraps."""

_ADDS_ONCE = "aiter/ops/mha.py: is_950_1block"
_LAST_BITS = "leave out deterministic_backward if gradients may differ in their last bits"

DETERMINISTIC = (
    KernelRule("aiter/asm_deterministic", "backward", ("gfx942",), lambda c: c.deterministic,
        "deterministic: ASM adds with atomics", _ADDS_ONCE, _LAST_BITS),
    KernelRule("aiter/asm_deterministic_gfx950", "backward", ("gfx950",),
        lambda c: c.deterministic and not _has_one_block(c),
        f"deterministic: ASM adds with atomics where keys are packed, more than {_KEYS_OF_A_TILE}, "
        "or head dims not equal ones from 72 to 128",
        _ADDS_ONCE, _LAST_BITS),
)  # fmt: skip
"""One block of keys adds to each element once. AITER's Python then takes a kernel that adds in 16
bits; that of 32 bits adds as often."""


def _has_one_block(call: AiterCall) -> bool:
    is_128 = call.head_dim == call.head_dim_v and 64 < call.head_dim <= 128
    return is_128 and not call.is_group and call.seq_len_kv <= _KEYS_OF_A_TILE


SOFT_CAP_GRADIENT = KernelRule(
    "aiter/asm_soft_cap_gradient", "backward", ("gfx942", "gfx950"),
    lambda c: c.logits_soft_cap > 0, "no kernel computes the gradient under logits_soft_cap",
    "no field of mha_bwd_args has it",
)  # fmt: skip
"""The rules of dev18 need no such row: those of CK refuse the gradient for ASM too."""

_FORWARD_192 = "forward with head dims (192, 128)"

RULES = (
    *(_changed(rule) for rule in ASM_RULES if rule.name not in _NO_LONGER),
    BEYOND_KEYS,
    ONE_QUERY,
    SOFT_CAP_GRADIENT,
    *DETERMINISTIC,
    OVER_INT32,
    OVER_GRID,
)  # fmt: skip
"""The calls that no ASM kernel runs, in the newest version."""

DOUBTS = (
    KernelRule("aiter/asm_192_barrier", "forward", ("gfx950",),
        lambda c: (c.head_dim, c.head_dim_v) == (192, 128),
        "AITER's ASM kernel for head dims (192, 128) on gfx950 lacks a barrier, so that its "
        "results would be wrong if one wave fell far behind another. No GPU is known to have shown "
        "it", DEFECTS, "`with attn_dispatch.aiter_asm(False):` computes the call with XLA"),
)  # fmt: skip
"""The calls that run on ASM with a warning."""

DQ_IS_STORED_EARLY = ("gfx942",)
"""Where the kernel that rounds the gradient of query stores its results with no wait for them."""

_BEFORE: tuple[tuple[Version, str, str, str, Callable[[AiterCall], bool]], ...] = (
    ((0, 1, 18), "gfx950", _FORWARD_192, "github.com/ROCm/aiter/pull/4239",
     lambda c: not c.backward and (c.head_dim, c.head_dim_v) == (192, 128)),
)  # fmt: skip
"""What is wrong before a version: the version, the architecture, the calls and the correction."""


def rules_of(release: Release) -> tuple[KernelRule, ...]:
    """The rules of a release: those of the newest version, and what is wrong in older ones."""
    older = (
        KernelRule(f"aiter/asm_before_{text_of(since)}", "both", (arch,), applies,
            f"{what}: wrong in AITER {text_of(release.version)}, right since {text_of(since)}",
            source, f"build AITER {text_of(since)} or newer")
        for since, arch, what, source, applies in _BEFORE
        if release.version < since
    )  # fmt: skip
    return (*RULES, *older)


def lacks(version: Version, arch: str) -> list[str]:
    """What a version does not run on an architecture and newer ones do."""
    return [
        f"{what} needs AITER {text_of(since)} or newer"
        for since, on, what, _, _ in _BEFORE
        if on == arch and version < since
    ]
