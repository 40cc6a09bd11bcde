"""What FlashAttention-4's kernels do not run, beside what no FlashAttention runs."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.fa4 import library
from attn_dispatch.flash import rules as flash_rules
from attn_dispatch.flash.call import head_dim

_WIDEST_OF_SM100 = 128
_MOST_BLOCKS = 65535
"""Of a launch grid's second and third axes, which heads and batch are in the backward pass's
smaller kernels, and in the forward pass's."""


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    """Of a call on a device that runs some."""
    reasons = list(flash_rules.not_supported_reasons(spec, library.NAME))
    if device.arch == "sm100" and (width := head_dim(spec)) > _WIDEST_OF_SM100:
        reasons.append(f"head dims up to {_WIDEST_OF_SM100} on sm100, got {width} columns")
    if not spec.is_backward and max(spec.batch, spec.num_heads) > _MOST_BLOCKS:
        reasons.append(
            f"batch and heads up to {_MOST_BLOCKS:,} each, got {spec.batch:,} and "
            f"{spec.num_heads:,}"
        )
    return tuple(reasons)
