"""What FlashAttention-4's kernels do not run, beside what no FlashAttention runs."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.fa4 import library
from attn_dispatch.flash import rules as flash_rules
from attn_dispatch.flash.call import head_dim
from attn_dispatch.reason import Reason, Rule, broken

_WIDEST_OF_SM100 = 128
_MAX_BLOCKS = 65535
"""Of a launch grid's second and third axes, which heads and batch are in the backward pass's
smaller kernels, and in the forward pass's."""


_RULES = (
    Rule[AttentionSpec](
        "fa4/batch_and_heads",
        lambda s: not s.is_backward and max(s.batch, s.num_heads) > _MAX_BLOCKS,
        f"batch and heads up to {_MAX_BLOCKS:,} each, got {{batch:,}} and {{heads:,}}",
        facts=lambda s: {"batch": s.batch, "heads": s.num_heads},
    ),
    Rule[AttentionSpec](
        # Of grouped heads its backward pass accumulates the gradients of key and value in two
        # arrays of zeros, in place. XLA makes one of them, and where it fuses a slice of an operand
        # into the custom call (in a scan over layers, say) it does not copy it again: both are
        # summed up in one place.
        "fa4/grouped_backward",
        lambda s: s.is_backward and s.num_heads != s.num_kv_heads,
        "the backward pass of {heads} heads on {kv_heads}: gradients of key and value are wrong in "
        "programs that slice their arrays (fa4-jax 0.1.0)",
        facts=lambda s: {"heads": s.num_heads, "kv_heads": s.num_kv_heads},
    ),
)

_WIDTH_OF_SM100 = Rule[AttentionSpec](
    "fa4/head_dim_sm100",
    lambda s: head_dim(s) > _WIDEST_OF_SM100,
    f"head dims up to {_WIDEST_OF_SM100} on sm100, got {{width}} columns",
    facts=lambda s: {"width": head_dim(s)},
)


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Of a call on a device that runs some."""
    rules = (_WIDTH_OF_SM100, *_RULES) if device.arch == "sm100" else _RULES
    return (*flash_rules.not_supported_reasons(spec, library.NAME), *broken(rules, spec))
