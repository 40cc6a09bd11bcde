"""The generations of FlashAttention in dew-flash-attn: their GPUs, custom calls and limits.

The table follows the package's Python (dew_flash_attn/__init__.py) and libraries. FlashAttention-2
has no code for sm90, and this version has not run on a GPU that it has code for:
tests/flash/test_custom_calls.py compares every custom call with the package's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FORWARD_TARGET = "attn_dispatch_flash_forward"
BACKWARD_TARGET = "attn_dispatch_flash_backward"
PACKED = "_packed"
"""The suffix of the custom calls for packed sequences."""


@dataclass(frozen=True)
class FfiTarget:
    """A custom call: its name, the library's symbol, and attributes beside causality and window."""

    name: str
    symbol: str
    scale: type[np.floating] = np.float64
    longest: tuple[str, ...] = ()
    """The attributes for the longest sequence of queries and of keys."""
    count: type[np.integer] = np.int64
    """The type of these attributes."""
    off: tuple[str, ...] = ()
    """The attributes that are False."""


@dataclass(frozen=True, eq=False)
class Generation:
    """One generation."""

    name: str
    archs: tuple[str, ...]
    library: str
    targets: tuple[FfiTarget, FfiTarget, FfiTarget, FfiTarget]
    """Forward, backward, and both for packed sequences."""
    tile: int
    """The most rows of a kernel's tile, of queries or keys. Batch rows of packed arrays lie so far
    apart."""
    widest: int = 256
    """The largest head dim."""
    widest_backward: dict[str, int] = field(default_factory=dict[str, int])
    """The largest head dim of the backward pass, by arch, where it is smaller."""
    blocks_limit_forward: bool = False
    """Whether batch (or sequences) and heads are axes of the launch grid in every pass, rather than
    only in the backward pass of whole rows."""
    cuts_gaps: bool = False
    """Whether gaps must be cut into sequences no longer than the longest one, because buffers have
    so many rows for each sequence."""
    note: str = ""

    def target(self, *, is_backward: bool, is_packed: bool) -> FfiTarget:
        return self.targets[2 * is_packed + is_backward]

    def widest_on(self, arch: str, *, is_backward: bool) -> int:
        return self.widest_backward.get(arch, self.widest) if is_backward else self.widest


_LONGEST_3 = ("max_seqlen", "max_seqlen_k")
FA3 = Generation(
    name="FlashAttention-3",
    archs=("sm90",),
    library="libdew_flash_attn3.so",
    targets=(
        FfiTarget(FORWARD_TARGET, "dew_flash3_mha_fwd"),
        FfiTarget(BACKWARD_TARGET, "dew_flash3_mha_bwd"),
        FfiTarget(FORWARD_TARGET + PACKED, "dew_flash3_mha_varlen_fwd", longest=_LONGEST_3),
        FfiTarget(BACKWARD_TARGET + PACKED, "dew_flash3_mha_varlen_bwd", longest=_LONGEST_3),
    ),
    tile=192,  # at head dim 64: hopper/tile_size.h
)

_LONGEST_2 = ("max_seqlen_q", "max_seqlen_k")
_FORWARD_2, _BACKWARD_2 = (x.replace("flash", "flash2") for x in (FORWARD_TARGET, BACKWARD_TARGET))
_SM8X_BUT_SM80 = ("sm86", "sm87", "sm89")
FA2 = Generation(
    name="FlashAttention-2",
    archs=("sm80", *_SM8X_BUT_SM80, "sm120"),
    library="libdew_flash_attn.so",
    targets=(
        FfiTarget(_FORWARD_2, "dew_flash_mha_fwd"),
        FfiTarget(_BACKWARD_2, "dew_flash_mha_bwd", off=("deterministic",)),
        FfiTarget(
            _FORWARD_2 + PACKED,
            "dew_flash_mha_varlen_fwd",
            longest=_LONGEST_2,
            count=np.int32,
            off=("zero_tensors",),
        ),
        FfiTarget(
            _BACKWARD_2 + PACKED,
            "dew_flash_mha_varlen_bwd",
            scale=np.float32,
            longest=_LONGEST_2,
            off=("zero_tensors", "deterministic"),
        ),
    ),
    tile=128,
    # The library checks: "FlashAttention backward for head dim > 192 requires A100/A800 or
    # H100/H800".
    widest_backward=dict.fromkeys((*_SM8X_BUT_SM80, "sm120"), 192),
    blocks_limit_forward=True,
    cuts_gaps=True,
    note="its custom calls are those of the package's own Python, and have never run here",
)

ALL = (FA3, FA2)
ARCHS = tuple(x for generation in ALL for x in generation.archs)


def generation_of(arch: str) -> Generation:
    """The generation for an arch; FlashAttention-3 for unknown ones, to list all reasons."""
    return next((x for x in ALL if arch in x.archs), FA3)
