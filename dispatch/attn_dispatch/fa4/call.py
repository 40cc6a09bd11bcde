"""One call in the terms of FlashAttention-4's kernels."""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash import call as flash_call
from attn_dispatch.flash.call import FlashCall, columns_of_value
from attn_dispatch.semantics.wider_arrays import round_up

_WIDE, _MULTIPLE_OF_WIDE = 128, 64
"""Beyond 128 columns, backward kernels for sm90 exist only for multiples of 64: 160 columns end in
an MLIRError (fa4-jax 0.1.0), and 224 run on sm80's kernels."""

_NARROWER_VALUES = (192, 128)
"""The head dims of MLA, the only ones at which kernels run values narrower than keys. With values
padded to 192 the forward pass took 18 to 54 % longer (H200)."""


def call_of(spec: AttentionSpec) -> FlashCall:
    """The call in FlashAttention-4's terms; the spec breaks no rule of rules.py."""
    call = flash_call.call_of(spec)
    if call.head_dim <= _WIDE:
        return call
    rounded = round_up(call.head_dim, _MULTIPLE_OF_WIDE)
    head_dim, head_dim_v = _NARROWER_VALUES
    if rounded == head_dim and columns_of_value(spec) <= head_dim_v:
        return replace(call, head_dim=head_dim, head_dim_v=head_dim_v)
    return replace(call, head_dim=rounded, head_dim_v=rounded) if spec.is_backward else call
