"""The public names: the one list of them, of which docs/api.md has the documentation."""

from attn_dispatch import integrations, mods, sequence, serving
from attn_dispatch._version import __version__
from attn_dispatch.aiter import register as register_aiter_calls
from attn_dispatch.api import dot_product_attention
from attn_dispatch.core.explanation import Explanation
from attn_dispatch.cudnn import register as register_cudnn_calls
from attn_dispatch.devices.target import target
from attn_dispatch.fa4 import register as register_fa4_calls
from attn_dispatch.flash import register as register_flash_calls
from attn_dispatch.inspection import dropout_mask, explain
from attn_dispatch.paged import paged_attention
from attn_dispatch.ragged import ragged_dot_product_attention
from attn_dispatch.setting_blocks import (
    aiter_asm,
    context_parallel,
    fallback,
    finite_padding,
    rewrites,
    scratch_limit,
    sharded_dropout,
    tuning,
)
from attn_dispatch.warning import (
    AttentionConventionWarning,
    AttentionFallbackWarning,
    AttentionKernelWarning,
    AttentionShardingWarning,
)
from attn_dispatch.whole_programs import assert_kernels, explain_program
from attn_dispatch.whole_programs.explained import ProgramExplanation

__all__ = [
    "AttentionConventionWarning",
    "AttentionFallbackWarning",
    "AttentionKernelWarning",
    "AttentionShardingWarning",
    "Explanation",
    "ProgramExplanation",
    "__version__",
    "aiter_asm",
    "assert_kernels",
    "context_parallel",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "explain_program",
    "fallback",
    "finite_padding",
    "integrations",
    "mods",
    "paged_attention",
    "ragged_dot_product_attention",
    "register_aiter_calls",
    "register_cudnn_calls",
    "register_fa4_calls",
    "register_flash_calls",
    "rewrites",
    "scratch_limit",
    "sequence",
    "serving",
    "sharded_dropout",
    "target",
    "tuning",
]
