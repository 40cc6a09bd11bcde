"""Warnings, once each, of valid calls that probably mean something else than they say.

Each is a rule: when it applies, what it says, and how to say what is meant, after which the rule no
longer applies.
"""

from __future__ import annotations

from attn_dispatch.call.axes_conventions import AXES_RULES
from attn_dispatch.call.checked_call import CheckedCall
from attn_dispatch.call.mod_facts import ModFacts
from attn_dispatch.call.values import known_values
from attn_dispatch.reason import Rule, broken
from attn_dispatch.warning import warn_of_convention


def warn_of_conventions(call: CheckedCall) -> None:
    """Warn of arguments of a valid call that probably mean something else."""
    shape = call.shape
    sizes = (*shape.leading, shape.seq_len_q, shape.seq_len_kv, shape.num_kv_heads)
    if not all(isinstance(x, int) for x in sizes):
        return  # a symbol of jax.export: its size is not known
    for reason in broken(_RULES, call):
        warn_of_convention(reason.text + reason.remedy)


def _names_no_alignment(call: CheckedCall) -> bool:
    """Whether causal_alignment is left open, and sequences may have more keys than queries."""
    queries, keys = call.longest
    is_open = call.arguments.causal_alignment is None and not call.arguments.same_lengths
    return is_open and queries < keys


def _is_of_one_query(call: CheckedCall) -> bool:
    return _names_no_alignment(call) and call.longest[0] == 1


def _distances(call: CheckedCall) -> list[str]:
    """The arguments that count distances from the diagonal."""
    slopes = ["alibi_slopes"] * ("alibi_slopes" in call.arrays)
    return ["local_window_size"] * call.has_window + slopes


def _at_the_end(call: CheckedCall) -> str:
    """The remedy: causal_alignment, which says where the queries are among the keys."""
    remedy = '. For a cache pass causal_alignment="bottom_right"'
    if "cu_seqlens_kv" not in call.arrays:
        remedy += ", with key_value_seq_lengths where it is not full"
    are_first = "the query is" if call.longest[0] == 1 else "the queries are"
    return remedy + f'; where {are_first} the first pass causal_alignment="top_left"'


def _leaves_padded_keys(call: CheckedCall) -> bool:
    """Whether only the queries of self-attention have lengths, and nothing else can hide keys."""
    a, shape = call.arguments, call.shape
    if "query_seq_lengths" not in call.arrays or "key_value_seq_lengths" in call.arrays:
        return False
    if shape.seq_len_q != shape.seq_len_kv or shape.seq_len_q == 1:
        return False
    if "query_segment_ids" in call.arrays or a.score_mod is not None or a.mask_mod is not None:
        return False
    if any(_differs_by_row(call, name) for name in ("mask", "bias")):
        return False
    is_bottom_right = isinstance(a.causal_alignment, str) and a.causal_alignment == "bottom_right"
    if call.is_of_the_past and not is_bottom_right:
        return False  # real queries come before the padding, and see no key after themselves
    lengths = known_values(a.query_seq_lengths)
    return lengths is None or bool((lengths != shape.seq_len_q).any())


def _differs_by_row(call: CheckedCall, name: str) -> bool:
    """Whether a mask or bias can hide different keys in each batch row."""
    if name not in call.arrays:
        return False
    of_batch = call.arrays[name].shape[:-3]
    return not call.shape.leading or any(x != 1 for x in of_batch)


def _mod_that_sees_ahead(call: CheckedCall) -> str | None:
    return ModFacts.of(call.arguments.mask_mod).sees_ahead


def _causality(call: CheckedCall) -> str:
    return "is_causal=True" if call.arguments.is_causal else "local_window_size=(…, 0)"


_RULES = (
    *AXES_RULES,
    Rule[CheckedCall](
        "call/one_causal_query",
        lambda c: _is_of_one_query(c) and c.arguments.is_causal,
        "is_causal=True with one query and several keys: top-left causality lets it attend key 0 "
        "alone",
        _at_the_end,
    ),
    Rule[CheckedCall](
        "call/one_query_at_a_distance",
        lambda c: _is_of_one_query(c) and not c.arguments.is_causal and bool(_distances(c)),
        "{names} with one query and several keys: top-left alignment counts distances from key 0",
        _at_the_end,
        facts=lambda c: {"names": " and ".join(_distances(c))},
    ),
    Rule[CheckedCall](
        "call/causal_queries_before_more_keys",
        lambda c: _names_no_alignment(c) and c.longest[0] > 1 and c.is_of_the_past,
        "{name} with {queries} queries and {keys} keys: top-left causality lets query i attend "
        "keys up to i, so that no query attends the last {rest}",
        _at_the_end,
        facts=lambda c: {
            "name": _causality(c),
            "queries": c.longest[0],
            "keys": c.longest[1],
            "rest": c.longest[1] - c.longest[0],
        },
    ),
    Rule[CheckedCall](
        "call/lengths_of_queries_alone",
        _leaves_padded_keys,
        "query_seq_lengths without key_value_seq_lengths, and as many keys as queries: real "
        "queries attend padded keys too",
        lambda c: (
            ". For self-attention pass the same array as key_value_seq_lengths, or only "
            "query_segment_ids, 0 in padding, which hold for both sides; where all keys are real "
            f"pass {c.shape.seq_len_kv} for each row as key_value_seq_lengths"
        ),
    ),
    Rule[CheckedCall](
        "call/causality_around_a_mod",
        lambda c: c.is_of_the_past and _mod_that_sees_ahead(c) is not None,
        "{name} with mods.{mod}: a query attends to a key only where both let it, so to none "
        "after itself, even in the prefix",
        lambda c: (
            f". {'Leave is_causal out' if c.arguments.is_causal else 'Pass (…, None)'}: "
            f"{_mod_that_sees_ahead(c)} is causal itself"
        ),
        facts=lambda c: {"name": _causality(c), "mod": _mod_that_sees_ahead(c)},
    ),
    Rule[CheckedCall](
        "call/soft_cap_before_bias",
        lambda c: c.arguments.logits_soft_cap is not None and "bias" in c.arrays,
        "logits_soft_cap with bias: the score is capped, then the bias is added. Code that caps "
        "score + bias, as tokamax does, computes another function, which has no argument",
    ),
)
