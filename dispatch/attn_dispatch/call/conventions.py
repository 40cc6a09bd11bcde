"""Warnings, once each, of valid calls that probably mean something else than they say.

Each is a rule: when it applies, what it says, and how to say what is meant, after which the rule no
longer applies. The rules about axes come first: arrays may be in another order than they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.mod_facts import ModFacts
from attn_dispatch.call.shapes import CallShape
from attn_dispatch.call.static_arguments import Side
from attn_dispatch.call.values import known_values
from attn_dispatch.reason import Rule, broken
from attn_dispatch.warning import warn_of_convention


@dataclass(frozen=True)
class CheckedCall:
    """A call whose arguments are valid, as the rules look at it."""

    arguments: Arguments
    """The arguments as the caller gave them, but with query, key and value in the order of
    operands.py."""
    arrays: Mapping[str, jax.Array]
    """The arrays of the call as the caller shaped them, by name."""
    shape: CallShape
    window: tuple[Side, Side]
    longest: tuple[int, int]
    """The largest number of queries and of keys of a sequence."""

    @property
    def has_window(self) -> bool:
        return self.window != (None, None)

    @property
    def is_of_the_past(self) -> bool:
        """Whether causality or the window hides the keys after the diagonal."""
        right = self.window[1]
        return self.arguments.is_causal or (isinstance(right, int) and right == 0)


def warn_of_conventions(call: CheckedCall) -> None:
    """Warn of arguments of a valid call that probably mean something else."""
    shape = call.shape
    sizes = (*shape.leading, shape.seq_len_q, shape.seq_len_kv, shape.num_kv_heads)
    if not all(isinstance(x, int) for x in sizes):
        return  # a symbol of jax.export: its size is not known
    for reason in broken(_RULES, call):
        warn_of_convention(reason.text + reason.remedy)


_MANY_HEADS = 128
"""If there are more kv heads than this, and than keys, that axis probably counts keys."""
_SOME_HEADS = 32
"""Likewise, if the call gives further evidence that the axis counts keys."""
_NARROW, _MOST_NARROW_HEADS = 64, 40
"""Models with more kv heads than this have wider ones: of 96, 112, 128 or 192 dims."""
_MANY_FEATURES = 256
"""Wider heads, more of them than keys, are probably the features of all heads."""


def _has_length_as_heads(call: CheckedCall) -> bool:
    """Whether the axis that is read as kv heads probably counts keys."""
    if not call.arrays.keys().isdisjoint(("cu_seqlens_q", "page_table")):
        return False  # the order of their axes is known
    shape = call.shape
    heads, keys = shape.num_kv_heads, shape.seq_len_kv
    if call.arguments.qkv_layout is not None:
        return shape.heads_first and heads > max(keys, _MANY_HEADS)
    if heads <= keys:
        return False
    if not shape.leading and shape.head_dim > _MANY_FEATURES:
        return True
    return heads > _MANY_HEADS or (heads > _SOME_HEADS and _other_evidence(call))


def _other_evidence(call: CheckedCall) -> bool:
    """Whether more than one number speaks for [..., heads, length, dim]."""
    shape = call.shape
    heads, keys, queries = shape.num_kv_heads, shape.seq_len_kv, shape.seq_len_q
    are_grouped = shape.num_heads == heads and keys < queries < heads and queries % keys == 0
    longest = (*call.window, call.arguments.max_segment_len)
    return (
        are_grouped  # as many query heads as kv heads, and several times as many queries as keys
        or shape.num_heads > heads  # models whose heads share keys have at most 32 kv heads
        or (heads > _MOST_NARROW_HEADS and shape.head_dim <= _NARROW)
        or heads % (4 if heads <= 64 else 8) != 0  # a usual length, but no usual number of heads
        or any(isinstance(x, int) and keys <= x < heads for x in longest)
    )


def _is_of_batch_and_keys(name: str) -> Callable[[CheckedCall], bool]:
    def applies(call: CheckedCall) -> bool:
        queries, keys = call.shape.seq_len_q, call.shape.seq_len_kv
        is_given = name in call.arrays and queries > 1
        return (
            is_given
            and call.shape.leading[-1:] == (queries,)
            and call.arrays[name].shape == (queries, keys)
        )

    return applies


def _is_of_batch_queries_and_keys(name: str) -> Callable[[CheckedCall], bool]:
    def applies(call: CheckedCall) -> bool:
        shape = call.shape
        heads = shape.num_heads
        return (
            name in call.arrays
            and heads > 1
            and shape.leading == (heads,)
            and call.arrays[name].shape == (heads, shape.seq_len_q, shape.seq_len_kv)
        )

    return applies


def _sizes(call: CheckedCall) -> dict[str, object]:
    shape = call.shape
    return {
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "queries": shape.seq_len_q,
        "keys": shape.seq_len_kv,
        "dim": shape.head_dim,
    }


_AS_READ = '; where the axes are as read pass qkv_layout="BTNH"'

_AXES_RULES = (
    Rule[CheckedCall](
        "call/length_as_heads",
        lambda c: bool(c.shape.leading) and _has_length_as_heads(c),
        "key has {keys} keys of {kv_heads} heads: {axes}",
        lambda c: "" if c.shape.heads_first else _AS_READ,
        facts=lambda c: _sizes(c) | {"axes": c.shape.axes},
    ),
    Rule[CheckedCall](
        "call/length_as_heads_of_three_dims",
        lambda c: (
            not c.shape.leading and "cu_seqlens_q" not in c.arrays and _has_length_as_heads(c)
        ),
        "key has 3 dims, which are read as {read}: {keys} keys of {kv_heads} heads of {dim}",
        lambda c: (
            "; split features [batch, length, features] by "
            "x.reshape(batch, length, heads, dim); "
            + (
                "for [length, heads, dim] leave out qkv_layout"
                if c.shape.heads_first
                else f'for [heads, length, dim] pass qkv_layout="BNTH"{_AS_READ}'
            )
        ),
        facts=lambda c: (
            _sizes(c)
            | {"read": "[heads, length, dim]" if c.shape.heads_first else "[length, heads, dim]"}
        ),
    ),
    *(
        Rule[CheckedCall](
            f"call/{name}_of_batch_and_keys",
            _is_of_batch_and_keys(name),
            f"{name}: [{{queries}}, {{keys}}] is taken for [queries, keys], and the batch is "
            "{queries} too",
            f". If it is [batch, keys] pass {name}[:, None, None, :]; else pass {name}[None, None]",
            facts=_sizes,
        )
        for name in ("mask", "bias")
    ),
    *(
        Rule[CheckedCall](
            f"call/{name}_of_batch_queries_and_keys",
            _is_of_batch_queries_and_keys(name),
            f"{name}: [{{heads}}, {{queries}}, {{keys}}] is taken for [heads, queries, keys], and "
            "the batch is {heads} too",
            f". If it is [batch, queries, keys] pass {name}[:, None]; else pass {name}[None]",
            facts=_sizes,
        )
        for name in ("mask", "bias")
    ),
)


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
    *_AXES_RULES,
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
