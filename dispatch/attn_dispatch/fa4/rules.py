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
    """Of a call on a device that runs some.

    Of grouped heads its backward pass accumulates the gradients of key and value in two arrays of
    zeros, in place. XLA makes one of them, and where it fuses a slice of an operand into the custom
    call (in a scan over layers, say) it does not copy it again: both are summed up in one place.
    """
    reasons = list(flash_rules.not_supported_reasons(spec, library.NAME))
    if device.arch == "sm100" and (width := head_dim(spec)) > _WIDEST_OF_SM100:
        reasons.append(f"head dims up to {_WIDEST_OF_SM100} on sm100, got {width} columns")
    if not spec.is_backward and max(spec.batch, spec.num_heads) > _MOST_BLOCKS:
        reasons.append(
            f"batch and heads up to {_MOST_BLOCKS:,} each, got {spec.batch:,} and "
            f"{spec.num_heads:,}"
        )
    if spec.is_backward and spec.num_heads != spec.num_kv_heads:
        reasons.append(
            f"the backward pass of {spec.num_heads} heads on {spec.num_kv_heads}: gradients of key "
            "and value are wrong in programs that slice their arrays (fa4-jax 0.1.0)"
        )
    return tuple(reasons)
