"""The calls that FlashAttention-4's compiled kernels do not run, with every reason."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4.call import (
    KernelCall,
    kernels_for,
    plain_kernels_for,
    score_change,
    tiles_of,
)
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.fa4.score_variant import MOST_ARRAYS, ScoreVariant
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.scalar_code import MOST_POSITION
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import interval_plan, mask_data
from attn_dispatch.semantics.common_rules import DTYPE, scale_rule

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
    scale_rule("fa4/scale", "kernels multiply"),
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
        *_change_reasons(spec),
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
    return (_NOT_COMPILED.reason(call.spec),)


@dataclass(frozen=True)
class _Changed:
    """A call, and its change of scores."""

    spec: AttentionSpec
    variant: ScoreVariant

    @property
    def copies(self) -> int:
        """The number of copies of the arrays that are read, one for each part of the batch."""
        return max((self.spec.shape(x)[0] for x in self.variant.arrays), default=1)


def _longest(spec: AttentionSpec) -> int:
    return max(spec.seq_len_q, spec.seq_len_kv)


def _is_from_bottom_right(spec: AttentionSpec) -> bool:
    """Whether the keys that ALiBi's distances count from are not those of the queries' numbers."""
    is_square = spec.seq_len_q == spec.seq_len_kv and not spec.has_lengths
    return spec.meaning.causal_alignment == "bottom_right" and not is_square


_CHANGE_RULES = (
    Rule[_Changed](
        "fa4/mod_positions",
        lambda c: c.spec.is_packed and bool(c.variant.indices & {"b", "t", "s"}),
        "{what} that reads positions or b: these kernels count them from the start of a batch row, "
        "not of a packed sequence",
        facts=lambda c: {"what": _what(c.spec)},
    ),
    Rule[_Changed](
        "fa4/mod_length",
        lambda c: bool(c.variant.indices & {"t", "s"}) and _longest(c.spec) > MOST_POSITION,
        f"{{what}} that reads positions up to {{length:,}}: these kernels count to "
        f"{MOST_POSITION:,}",
        facts=lambda c: {"what": _what(c.spec), "length": _longest(c.spec)},
    ),
    Rule[_Changed](
        "fa4/mod_copies",
        lambda c: c.copies > 1,
        "{what} with other arrays in some batch rows: these kernels read one for all",
        facts=lambda c: {"what": _what(c.spec)},
    ),
    Rule[_Changed](
        "fa4/mod_arrays",
        lambda c: len(c.variant.arrays) > MOST_ARRAYS,
        f"{{what}} that reads {{arrays}} arrays: these kernels read at most {MOST_ARRAYS}",
        facts=lambda c: {"what": _what(c.spec), "arrays": len(c.variant.arrays)},
    ),
    Rule[_Changed](
        "fa4/slopes_from_bottom_right",
        lambda c: c.spec.has("alibi_slopes") and _is_from_bottom_right(c.spec),
        "alibi_slopes with causal_alignment='bottom_right' and other numbers of keys than of "
        "queries: these kernels count distances from the top left",
    ),
    Rule[_Changed](
        "fa4/slopes_by_offset",
        lambda c: c.spec.has("alibi_slopes") and c.spec.meaning.causal_alignment == "by_offset",
        "alibi_slopes with a number as causal_alignment: these kernels count distances from the "
        "top left",
    ),
)

_NOT_COMPILED = Rule[AttentionSpec](
    "fa4/mod_not_compiled",
    lambda s: True,
    "no kernels are compiled with this {what}",
    lambda s: (
        f"run `attn-dispatch build-fa4 --add --mod {_mod(s)}`, which "
        f"compiles {'it' if _is_one(s) else 'one score_mod that does all of it'} into kernels"
    ),
    facts=lambda s: {"what": _what(s)},
)


def _change_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """The reasons against a call's change of scores, whatever is compiled."""
    found = score_change(spec)
    if isinstance(found, Unsupported):
        where = f" (at {found.line})" if found.line else ""
        facts = (("operation", found.text), ("line", found.line))
        text = f"{_what(spec)}: {found.text}{where}"
        return (Reason(f"fa4/mods/{found.kind}", facts, text),)
    return () if found is None else broken(_CHANGE_RULES, _Changed(spec, found))


def _what(spec: AttentionSpec) -> str:
    """The arguments that change scores."""
    has = {
        "logits_soft_cap": spec.meaning.logits_soft_cap is not None,
        "score_mod": spec.meaning.score_mod is not None,
        "alibi_slopes": spec.has("alibi_slopes"),
    }
    return " and ".join(name for name, is_there in has.items() if is_there)


def _is_one(spec: AttentionSpec) -> bool:
    return " and " not in _what(spec)


def _mod(spec: AttentionSpec) -> str:
    """What --mod takes for the call's change of scores."""
    what, cap = _what(spec), spec.meaning.logits_soft_cap
    if what == "logits_soft_cap":
        return f"'attn_dispatch.mods:soft_cap({cap:g})'"
    if what == "alibi_slopes":
        return "'attn_dispatch.mods:alibi([1.0])'"
    return "MODULE:FUNCTION"
