"""The calls whose masks are not known to be intervals of keys."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.program import axes_of
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import EMPTY
from attn_dispatch.semantics.evaluated_intervals import evaluated_pairs
from attn_dispatch.semantics.mod_intervals import known_set

_MAX_EVALUATED_PAIRS = 2**36
"""262,144 queries and as many keys."""


def _differs_by_head(spec: AttentionSpec) -> bool:
    program = spec.meaning.mask_mod
    return program is not None and spec.num_heads > 1 and "n" in axes_of(program)


def _is_known_shape(spec: AttentionSpec) -> bool:
    return not (spec.is_paged or spec.has_symbolic_length or spec.is_empty)


def is_evaluated(spec: AttentionSpec) -> bool:
    """Whether intervals are found by computing the mask_mod for all pairs."""
    return spec.meaning.mask_mod is not None and known_set(spec) is None


def _has_many_pairs(spec: AttentionSpec) -> bool:
    if not _is_known_shape(spec) or not is_evaluated(spec):
        return False
    return evaluated_pairs(spec) > _MAX_EVALUATED_PAIRS


RULES = (
    EMPTY,
    Rule[AttentionSpec](
        "intervals/pages",
        lambda s: s.is_paged,
        "keys in pages: intervals are those of keys in one array",
    ),
    Rule[AttentionSpec](
        "intervals/symbolic_lengths",
        lambda s: s.has_symbolic_length,
        "lengths that are symbols of jax.export: the number of rows has to be known",
        "export with known lengths",
    ),
    Rule[AttentionSpec](
        "intervals/mask",
        lambda s: s.has("mask"),
        "mask: its rows may have any number of intervals",
        "describe the mask by a mask_mod, lengths or segment ids",
    ),
    Rule[AttentionSpec](
        "intervals/mod_by_head",
        _differs_by_head,
        "a mask_mod that differs by head: all heads share their intervals",
        "leave n out of mask_mod, or call for each head alone",
    ),
    Rule[AttentionSpec](
        "intervals/evaluated_pairs",
        _has_many_pairs,
        f"a mask_mod whose ranges are not found in its operations, of {{pairs:,}} pairs; at most "
        f"{_MAX_EVALUATED_PAIRS:,} are computed",
        "compare s with numbers of the query in mask_mod, or pass a window around it",
        facts=lambda s: {"pairs": evaluated_pairs(s)},
    ),
)


def not_supported_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """Every reason why a call's mask cannot be given as intervals."""
    return broken(RULES, spec)
