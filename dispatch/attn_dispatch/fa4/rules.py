"""The calls that FlashAttention-4's kernels do not run, beside those of flash/rules.py."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.fa4 import library
from attn_dispatch.flash import rules as flash_rules
from attn_dispatch.flash.call import head_dim
from attn_dispatch.reason import Reason, Rule, broken

_WIDEST_OF_SM100 = 128
_MAX_BLOCKS = 65535
"""The limit of a launch grid's second and third axes. These are heads and batch in the forward
kernels and in the smaller backward kernels."""


_RULES = (
    Rule[AttentionSpec](
        "fa4/batch_and_heads",
        lambda s: not s.is_backward and max(s.batch, s.num_heads) > _MAX_BLOCKS,
        f"batch and heads up to {_MAX_BLOCKS:,} each, got {{batch:,}} and {{heads:,}}",
        facts=lambda s: {"batch": s.batch, "heads": s.num_heads},
    ),
    Rule[AttentionSpec](
        # With grouped heads, the backward pass accumulates the gradients of key and value in place,
        # in two arrays of zeros. XLA shares one array for both, and does not copy it if it fuses a
        # slice of an operand into the custom call, as in a scan over layers. Then both gradients
        # are summed in one array.
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
    """Every reason against a call, on a device that the kernels run on."""
    rules = (_WIDTH_OF_SM100, *_RULES) if device.arch == "sm100" else _RULES
    return (*flash_rules.not_supported_reasons(spec, library.NAME), *broken(rules, spec))
