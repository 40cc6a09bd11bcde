"""The calls that FlashAttention-4's compiled kernels do not run, with every reason."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4 import compiled, score_rules
from attn_dispatch.fa4.call import kernels_for, plain_kernels_for, score_change, tiles_of
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import interval_plan, mask_data
from attn_dispatch.semantics.common_rules import DTYPE, scale_remedy
from attn_dispatch.semantics.scaled_query import is_out_of_range

FEATURES = (
    "causality and windows",
    "lengths",
    "segment ids",
    "cu_seqlens",
    "mask",
    "mask_mod",
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


@dataclass(frozen=True)
class _KernelCall:
    """A call, and the kernels that were compiled."""

    spec: AttentionSpec
    library: CompiledLibrary

    @property
    def remedy(self) -> str:
        """The command that compiles kernels for its head dims; "" if build-fa4 has none."""
        archs = {x.arch for x in self.library.sets}
        if len(archs) != 1:  # the library is not narrowed to that of a device that it is for
            return ""
        (arch,) = archs
        fits = max(self.spec.head_dim, self.spec.head_dim_v) <= _WIDEST.get(arch, 0)
        return f"run {compiled.build_command(arch)}" if fits else ""


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

_COMPILED = Rule[_KernelCall](
    "fa4/head_dim",
    lambda c: plain_kernels_for(c.spec, c.library) is None,
    "kernels are compiled for {compiled}, got {width}/{width_v} {dtype}{grouped}",
    lambda c: c.remedy,
    facts=lambda c: {
        "compiled": compiled.names(x for x in c.library.sets if not (x.variant or x.is_wide)),
        "width": c.spec.head_dim,
        "width_v": c.spec.head_dim_v,
        "dtype": c.spec.dtype,
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
        return _not_compiled(_KernelCall(spec, library), has_change=change is not None)
    sinks = broken((_SINKS,), kernels) if spec.has("sinks") else ()
    return (*sinks, *interval_plan.not_supported_reasons(spec, tiles_of(kernels)))


def _not_compiled(call: _KernelCall, *, has_change: bool) -> tuple[Reason, ...]:
    """The reason against a call without kernels.

    Where they can be compiled with the call's change of scores, that is the only one: the command
    for it compiles all head dims.
    """
    plain = broken((_COMPILED,), call)
    if plain and not (has_change and call.remedy):
        return plain
    return (score_rules.not_compiled(call.spec),)
