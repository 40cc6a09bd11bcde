"""The calls that FlashAttention-4's compiled kernels do not run, with every reason."""

from __future__ import annotations

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4 import score_rules
from attn_dispatch.fa4.call import kernels_for, plain_kernels_for, score_change, tiles_of
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.fa4.kernel_call import KernelCall
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import interval_plan, mask_data
from attn_dispatch.semantics.common_rules import DTYPE, scale_remedy
from attn_dispatch.semantics.scaled_query import is_out_of_range

MASKS = (
    "causality and windows", "causal_alignment as a number", "lengths", "segment ids", "cu_seqlens",
    "mask", "mask_mod",
)  # fmt: skip
"""The features that say which pairs are seen."""

FEATURES = (
    *MASKS,
    "logits_soft_cap",
    "alibi_slopes",
    "score_mod",
    "sinks",
    "the gradient of lse",
    "the gradient of sinks",
)

_WIDEST = {"sm90": 256, "sm100": 128}
"""The most columns of the sets that build-fa4 compiles, for each architecture."""

_MAX_BLOCKS = 65535
"""The limit of a launch grid's second and third axes, which count heads and batch rows."""


RULES = (
    Rule[AttentionSpec](
        "fa4/batch_and_heads",
        lambda s: max(s.batch, s.num_heads) > _MAX_BLOCKS,
        f"batch and heads up to {_MAX_BLOCKS:,} each, got {{batch:,}} and {{heads:,}}",
        facts=lambda s: {"batch": s.batch, "heads": s.num_heads},
    ),
    Rule[AttentionSpec](
        "fa4/scale",
        is_out_of_range,
        "scale {scale:g}: kernels multiply by it in float32, where it or its reciprocal is no "
        "normal number",
        scale_remedy,
        facts=lambda s: {"scale": s.meaning.scale},
    ),
)
"""What every kernel needs."""

_COMPILED = Rule[KernelCall](
    "fa4/head_dim",
    lambda c: plain_kernels_for(c.spec, c.library) is None,
    "kernels are compiled for {compiled}, got {width}/{width_v} {dtype}{grouped}",
    lambda c: c.remedy(_WIDEST),
    facts=lambda c: {
        **c.facts(lambda x: not (x.variant or x.is_wide)),
        "grouped": ", with grouped heads in the backward pass" if _is_grouped(c.spec) else "",
    },
)


_SINKS = Rule[KernelSet](
    "fa4/sinks",
    lambda kernels: not kernels.takes_sinks,
    "sinks: kernels for {arch} take none",
    facts=lambda kernels: {"arch": kernels.arch},
)


def _is_grouped(spec: AttentionSpec) -> bool:
    return spec.is_backward and spec.num_heads != spec.num_kv_heads


def not_supported_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """Every reason against a call by these kernels, on a device that they run on."""
    return (
        *unknown_features(spec, FEATURES, "FlashAttention-4's compiled kernels have none"),
        *broken((DTYPE, *RULES), spec),
        *score_rules.not_supported_reasons(spec),
        *_kernel_reasons(spec, library),
    )


def _kernel_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """The reasons against a call's mask and head dims."""
    if reasons := mask_data.not_supported_reasons(spec):
        return reasons
    change = score_change(spec)
    if not library.is_usable or DTYPE.applies(spec) or isinstance(change, Unsupported):
        return ()  # which other reasons say
    kernels = kernels_for(spec, library)
    if kernels is None:
        return _not_compiled(KernelCall(spec, library), has_change=change is not None)
    sinks = broken((_SINKS,), kernels) if spec.has("sinks") else ()
    return (*sinks, *interval_plan.not_supported_reasons(spec, tiles_of(kernels)))


def _not_compiled(call: KernelCall, *, has_change: bool) -> tuple[Reason, ...]:
    """The reason against a call without kernels.

    Where they can be compiled with the call's change of scores, that is the only one: the command
    for it compiles all head dims.
    """
    plain = broken((_COMPILED,), call)
    if plain and not (has_change and call.remedy):
        return plain
    return (score_rules.not_compiled(call.spec),)
