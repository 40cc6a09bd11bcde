"""The generations of FlashAttention in dew-flash-attn: which GPUs each is for, and what it is told.

A table of its targets, attributes and limits, as its Python (dew_flash_attn/__init__.py) and its
libraries have them. FlashAttention-2 has no code for sm90, and no GPU that it has code for has run
this: tests/flash/test_custom_calls.py compares every custom call with the package's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FORWARD_TARGET = "attn_dispatch_flash_forward"
BACKWARD_TARGET = "attn_dispatch_flash_backward"
PACKED = "_packed"
"""What the names of the same for packed sequences end with."""


@dataclass(frozen=True)
class FfiTarget:
    """A custom call: our name, the library's, and its attributes beside causality and window."""

    name: str
    symbol: str
    scale: type[np.floating] = np.float64
    longest: tuple[str, ...] = ()
    """What the longest sequence of queries and of keys are called."""
    count: type[np.integer] = np.int64
    """Their type."""
    off: tuple[str, ...] = ()
    """What else can be switched on, and is not."""


@dataclass(frozen=True, eq=False)
class Generation:
    """One of them."""

    name: str
    archs: tuple[str, ...]
    library: str
    targets: tuple[FfiTarget, FfiTarget, FfiTarget, FfiTarget]
    """Forward, backward, and both for packed sequences."""
    tile: int
    """The most rows that a kernel of it takes at once, of queries or keys: so far apart lie batch
    rows of packed arrays."""
    widest: int = 256
    widest_backward: dict[str, int] = field(default_factory=dict)
    """The same of the backward pass, by arch, where it is less."""
    blocks_limit_forward: bool = False
    """Whether batch (or sequences) and heads are axes of the launch grid in every pass, and not in
    the backward pass of whole rows alone."""
    cuts_gaps: bool = False
    """Whether what belongs to no sequence has to be cut into sequences no longer than the longest:
    buffers have so many rows for each."""
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
    # "FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800": its own check.
    widest_backward=dict.fromkeys((*_SM8X_BUT_SM80, "sm120"), 192),
    blocks_limit_forward=True,
    cuts_gaps=True,
    note="its custom calls are those of the package's own Python, and have never run here",
)

ALL = (FA3, FA2)
ARCHS = tuple(x for generation in ALL for x in generation.archs)


def generation_of(arch: str) -> Generation:
    """The one for an arch; of others FlashAttention-3, whose rules then tell what else is wrong."""
    return next((x for x in ALL if arch in x.archs), FA3)
