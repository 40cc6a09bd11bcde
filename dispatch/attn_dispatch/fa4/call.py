"""One call's facts, as FlashAttention-4's kernels are told them."""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash import call as flash_call
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.semantics.padding import round_up

_WIDE, _MULTIPLE_OF_WIDE = 128, 64
"""Beyond so many columns the backward kernels of sm90 are compiled for multiples of 64 alone: 160
of them end in an MLIRError (fa4-jax 0.1.0), and 224 run on sm80's kernels."""


def call_of(spec: AttentionSpec) -> FlashCall:
    """The call of a spec that rules.py does not refuse."""
    call = flash_call.call_of(spec)
    if not spec.is_backward or call.head_dim <= _WIDE:
        return call
    return replace(call, head_dim=round_up(call.head_dim, _MULTIPLE_OF_WIDE))
