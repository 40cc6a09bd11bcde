"""Rules about valid arrays whose axes probably are in another order than they are read in."""

from __future__ import annotations

from collections.abc import Callable

from attn_dispatch.call.checked_call import CheckedCall
from attn_dispatch.reason import Rule

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

AXES_RULES = (
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
