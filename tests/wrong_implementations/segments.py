"""Wrong segments and lengths."""

from __future__ import annotations

from itertools import chain

import jax.numpy as jnp

from tests.wrong_implementations.features import pads_keys, pads_queries, returns_lse
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import clean, first_everywhere, groups


@wrong(lambda c: c.q_segments)
def last_segment_dropped(call):
    """The queries of a row's last segment are taken for padding."""
    ids = call["query_segment_ids"]
    return call.right({"query_segment_ids": jnp.where(ids == ids.max(axis=1)[:, None], 0, ids)})


@wrong(lambda c: c.q_segments)
def segments_not_separated(call):
    """All segments of a row are one segment."""
    names = ("query_segment_ids", "key_value_segment_ids")
    return call.right({name: jnp.minimum(call[name], 1) for name in names})


@wrong(lambda c: c.q_segments and pads_queries(c) and pads_keys(c))
def padding_is_a_segment(call):
    """Padding attends to padding, as if 0 were a segment like the others."""
    most = call.options.meaning.max_segments
    names = ("query_segment_ids", "key_value_segment_ids")
    changed = {name: call[name] + 1 for name in names}
    return call.right(changed, max_segments=None if most is None else most + 1)


@wrong(lambda c: c.max_segments and max(chain(*c.q_segments)) > c.max_segments)
def segments_past_the_largest_are_kept(call):
    """Segments with an id larger than max_segments are not taken for padding."""
    return call.right(max_segments=None)


@wrong(lambda c: c.q_segments and c.b > 1)
def segments_of_the_first_batch_row(call):
    """All batch rows have the key segments of the first."""
    return call.right({"key_value_segment_ids": first_everywhere(call["key_value_segment_ids"])})


@wrong(lambda c: c.cu_q)
def last_sequence_dropped(call):
    """The queries of the last of several packed sequences are taken for padding."""
    starts = call["cu_seqlens_q"]
    return call.right({"cu_seqlens_q": starts.at[:, -1].set(starts[:, -2])})


@wrong(lambda c: c.cu_kv and len(c.cu_kv[0]) > 2)
def sequences_of_keys_start_one_late(call):
    """Every packed sequence of keys but the first starts one key late."""
    starts = call["cu_seqlens_kv"]
    late = jnp.minimum(starts.at[:, 1:-1].add(1), starts[:, -1:])
    return call.right({"cu_seqlens_kv": late})


@wrong(lambda c: c.cu_kv and c.b > 1)
def sequences_of_the_first_batch_row(call):
    """All batch rows have the packed key sequences of the first."""
    return call.right({"cu_seqlens_kv": first_everywhere(call["cu_seqlens_kv"])})


@wrong(lambda c: min(c.kv_lengths or (c.s,)) < c.s)
def key_length_one_too_long(call):
    """The first key of the padding is visible."""
    lengths = jnp.minimum(call["key_value_seq_lengths"] + 1, call.spec.seq_len_kv)
    return call.right({"key_value_seq_lengths": lengths})


@wrong(lambda c: max(c.kv_lengths or (0,)) > 0)
def key_length_one_too_short(call):
    """The last key before the padding is hidden."""
    lengths = jnp.maximum(call["key_value_seq_lengths"] - 1, 0)
    return call.right({"key_value_seq_lengths": lengths})


@wrong(lambda c: max(c.kv_lengths or (0,)) > c.s)
def key_length_past_the_array_is_none(call):
    """A length beyond the end of the array is taken for 0, not for the whole array."""
    lengths = call["key_value_seq_lengths"]
    lengths = jnp.where(lengths > call.spec.seq_len_kv, 0, lengths)
    return call.right({"key_value_seq_lengths": lengths})


@wrong(lambda c: c.kv_lengths and len(set(c.kv_lengths)) > 1)
def key_lengths_of_the_first_batch_row(call):
    """All batch rows have as many keys as the first."""
    return call.right({"key_value_seq_lengths": first_everywhere(call["key_value_seq_lengths"])})


@wrong(lambda c: min(c.q_lengths or (c.t,)) < c.t)
def query_lengths_ignored(call):
    """The queries in the padding are computed like the others."""
    return call.right({"query_seq_lengths": None})


@wrong(lambda c: min(c.q_lengths or (c.t,)) < c.t, "forward")
def padding_queries_not_zeroed(call):
    """The output of the queries in the padding is that of the first query, not 0."""
    results = call.right()
    is_real = jnp.arange(call.spec.seq_len_q) < call["query_seq_lengths"][:, None]
    out = jnp.where(is_real[..., None, None], results["out"], results["out"][:, :1])
    return results | {"out": out}


@wrong(lambda c: min(c.q_lengths or (c.t,)) < c.t, "backward")
def gradient_left_in_padding_queries(call):
    """The gradient of the queries in the padding is very small, not 0."""
    results = call.right()
    if "query" not in results:
        return results
    is_real = jnp.arange(call.spec.seq_len_q) < call["query_seq_lengths"][:, None]
    return results | {"query": jnp.where(is_real[..., None, None], results["query"], 1e-6)}


@wrong(pads_keys, "forward")
def nan_of_padding_keys_let_through(call):
    """The keys in the padding are multiplied by 0, so that NaN among them reaches the output."""
    results = call.right()
    nothing = 0 * call["key"].sum(axis=(1, 2, 3))[:, None, None, None]
    return results | {"out": results["out"] + nothing}


@wrong(pads_queries, "backward")
def nan_of_padding_queries_let_through(call):
    """The queries in the padding are multiplied by 0, so that NaN reaches the gradient of key."""
    results = call.right()
    nothing = 0 * call["query"].sum(axis=(1, 2, 3))[:, None, None, None]
    return results | ({"key": results["key"] + nothing} if "key" in results else {})


@wrong(lambda c: 0 in (c.kv_lengths or ()) and returns_lse(c), "forward")
def lse_of_an_empty_sequence_is_zero(call):
    """The lse of a sequence without keys is 0."""
    results = call.right(needs_lse=True)
    is_empty = call["key_value_seq_lengths"] == 0
    return results | {"lse": jnp.where(is_empty[:, None, None], 0, results["lse"])}


@wrong(lambda c: 0 in (c.kv_lengths or ()), "forward")
def empty_sequence_is_divided_by_zero(call):
    """The output of a sequence without keys is 0 / 0."""
    results = call.right()
    is_empty = (call["key_value_seq_lengths"] == 0)[:, None, None, None]
    return results | {"out": jnp.where(is_empty, jnp.nan, results["out"])}


@wrong(lambda c: c.dead_rows or c.infinite_bias or 0 in (c.kv_lengths or ()), "forward")
def queries_without_keys_take_the_mean(call):
    """A query that sees no keys attends to all of them equally, as with scores of -1e9."""
    results = call.right(needs_lse=True)
    mean = jnp.repeat(clean(call["value"]).mean(axis=1), groups(call), axis=1)
    is_dead = (results["lse"] == -jnp.inf).swapaxes(1, 2)[..., None]
    return results | {"out": jnp.where(is_dead, mean[:, None], results["out"])}
