"""The changes of scores that FlashAttention-4's compiled kernels do not compute, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4.call import score_change
from attn_dispatch.fa4.score_variant import MOST_ARRAYS, ScoreVariant
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.scalar_code import MOST_POSITION
from attn_dispatch.reason import Reason, Rule, broken


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


_RULES = (
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


def not_supported_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """The reasons against a call's change of scores, whatever is compiled."""
    found = score_change(spec)
    if isinstance(found, Unsupported):
        where = f" (at {found.line})" if found.line else ""
        facts = (("operation", found.text), ("line", found.line))
        text = f"{_what(spec)}: {found.text}{where}"
        return (Reason(f"fa4/mods/{found.kind}", facts, text),)
    return () if found is None else broken(_RULES, _Changed(spec, found))


def not_compiled(spec: AttentionSpec) -> Reason:
    """The reason where only kernels with this change of scores are missing."""
    return _NOT_COMPILED.reason(spec)


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
