"""A call on a cache as a call on whole pages, which all queries of a row see, and one on the rest.

If a call has more options than a scale, or several queries, kernels multiply by values past a
length, and 0 · NaN is NaN (cuDNN 9.19 and 9.28, H200). So the kernel is given only *whole* pages:
those of which every query of the row sees every key. The inner call then has no band, and no length
ends inside a page. Past a row's last whole page the table repeats that page, all of whose keys are
real. With a window, the table begins with the first whole page, so it omits the keys left of the
window.

The keys that remain at either end, fewer than the keys of a page and the queries together, are
copied. For a few queries XLA attends to them; otherwise a kernel does, as to an array with lengths.
The results are merged by lse. Before all this, pages are cut into blocks of at most 64 keys, and an
array is divided into blocks as well (blocks.py). Neither is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.options import Promises
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.kv_cache.blocks import IN_BLOCKS, Blocks
from attn_dispatch.core.rewrites.kv_cache.few_queries import MAX_QUERIES, is_plain
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import MOST_AS_HEADS, PART
from attn_dispatch.core.rewrites.kv_cache.merged_keys import (
    MOST_MERGED_PAIRS,
    results_of,
    with_keys_merged,
)
from attn_dispatch.core.rewrites.rewrite import (
    CACHE,
    LENGTHS,
    Arrangement,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    keys_as_rows,
    without_band,
)
from attn_dispatch.semantics.given_ids import row_lengths
from attn_dispatch.semantics.merge import merged
from attn_dispatch.semantics.pages import keys_at
from attn_dispatch.semantics.wider_arrays import pad_last, round_up

_REFUSED = ("mask", "window", "alibi_slopes", "sinks", "dropout_key")
"""Operands with which the rewrite does not apply."""

_TILE = PART
"""A table has room for a multiple of this many keys."""

_MOST_PADDED = 128
"""The most queries of a row, if there are several rows and query_seq_lengths. With this rewrite
kernels compute padding rows, too: 63 rows of one query and one row of 512 took 2.3 times as long as
with their keys gathered (64 rows of 4k keys, H200, cuDNN 9.19)."""

_LEAST_WHOLE = 4
"""The fewest blocks in a window. The keys in a smaller window are copied (near_keys.py)."""


def _inner(spec: AttentionSpec) -> AttentionSpec:
    plan = _plan(spec)
    keys = plan.columns * plan.blocks.size
    return changed(
        spec,
        without=("key", "value"),
        sizes={"s": keys, **plan.blocks.sizes(plan.columns)},
        made=IN_BLOCKS,
        arrays=_bias(spec, keys) if _begin_anywhere(spec) else {},
        meaning=without_band(plan.blocks.meaning(spec)),
        wanted=replace(spec.wanted, needs_lse=True),
        promises=Promises(whole_pages=True, is_checked=True, ignores_padding_rows=True),
    )


def _beside(spec: AttentionSpec) -> AttentionSpec | None:
    """The call on the keys after the whole pages; None if XLA attends to them or there are none."""
    plan = _plan(spec)
    if spec.seq_len_q <= MAX_QUERIES or not plan.after:
        return None
    return changed(
        spec,
        without=IN_BLOCKS,
        sizes={"s": plan.after},
        made=("key", "value"),
        meaning=keys_as_rows(spec.meaning),
        wanted=replace(spec.wanted, needs_lse=True),
        promises=replace(spec.promises, is_checked=True),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    plan = _plan(spec)
    ends = _Ends.of(spec, operands, plan)
    table, count = plan.blocks.table(spec, operands), ends.count[:, None]
    column = ends.first[:, None] + jnp.minimum(
        jnp.arange(plan.columns, dtype=jnp.int32)[None], jnp.maximum(count - 1, 0)
    )
    given = {
        **operands,
        **plan.blocks.pools(spec, operands),
        "page_table": jnp.take_along_axis(
            table, jnp.clip(column, 0, plan.blocks.columns - 1), axis=1
        ),
        "key_value_seq_lengths": ends.count * plan.blocks.size,
    }
    if spec.has("bias"):
        length, bias = plan.columns * plan.blocks.size, operands["bias"]
        if _begin_anywhere(spec):
            bias = _bias_at(bias, ends.begin[:, None] + jnp.arange(length, dtype=jnp.int32))
        given["bias"] = pad_last(bias[..., :length], length)
    results = calls.kernel(for_(inner, given))
    t = jnp.arange(spec.seq_len_q, dtype=jnp.int32)[None]
    # The kernel's results for a row without keys are unspecified.
    is_real = (count > 0) & (t < ends.queries[:, None])
    out, lse = results["out"], jnp.swapaxes(results["lse"], 1, 2)
    lse = jnp.where(is_real[..., None], lse, -jnp.inf)
    if (beside := _beside(spec)) is not None:
        rest = _by_kernel(spec, operands, plan, ends, beside, calls)
        out, lse = merged(out, lse, *rest)
    elif plan.before or plan.after:
        out, lse = _by_xla(spec, operands, plan, ends, calls, (out, lse))
    return results_of(spec, operands, out, lse, t < ends.queries[:, None])


@dataclass(frozen=True)
class _Plan:
    """The sizes of a call's parts, which do not depend on the values of its lengths."""

    blocks: Blocks
    columns: int
    """The most whole blocks of a row, rounded up to a kernel's tile."""
    before: int
    """The most keys left of the whole blocks that some query sees."""
    after: int
    """The most keys right of the whole blocks that some query sees."""

    @staticmethod
    def of(spec: AttentionSpec) -> _Plan | None:
        """The plan of a call; None if the rewrite does not apply to it."""
        if not _can_be_split(spec) or _is_left_to_others(spec):
            return None
        if (blocks := Blocks.of(spec)) is None:
            return None
        (left, right), columns = spec.band, blocks.columns
        if left is not None:
            seen = spec.seq_len_kv if right is None else left + right + 1
            columns = min(columns, seen // blocks.size)
            if columns < _LEAST_WHOLE:
                return None
        columns = round_up(columns, -(-_TILE // blocks.size))
        is_open = (left, right) == (None, None)
        apart = blocks.size - 1 + (0 if is_open else spec.seq_len_q - 1)
        if spec.seq_len_q > MAX_QUERIES and 2 * apart > spec.seq_len_kv:
            return None  # so many keys remain that copying all is as good
        return _Plan(blocks, columns, 0 if left is None else apart, apart)


def _can_be_split(spec: AttentionSpec) -> bool:
    """Whether the results follow from those of whole blocks and those of the other keys."""
    if spec.is_empty or spec.promises.whole_pages or spec.is_packed:
        return False
    if not spec.has("key_value_seq_lengths") or any(map(spec.has, _REFUSED)) or spec.meaning.mods:
        return False
    if spec.wanted.needs_max or spec.wanted.needs_keep or 0 in (spec.head_dim, spec.head_dim_v):
        return False
    left, right = spec.band
    is_open = (left, right) == (None, None)
    if not is_open and spec.meaning.causal_alignment != "bottom_right":
        return False
    return right is None or right >= 0


def _is_left_to_others(spec: AttentionSpec) -> bool:
    """Whether another rewrite computes less for the call, or this one would make large arrays."""
    is_many = spec.seq_len_q > MAX_QUERIES
    rows = spec.seq_len_q * spec.num_heads // spec.num_kv_heads
    goes_as_heads = spec.seq_len_q == 1 or rows <= MOST_AS_HEADS
    if not is_many and is_plain(spec) and goes_as_heads:
        return True  # few_queries.py leaves fewer keys to XLA
    if spec.has("bias") and (is_many or not spec.is_paged or spec.shape("bias")[3] == 1):
        return True  # the bias would be an array of many pairs
    if is_many and (spec.band[0] is not None or not spec.is_paged):
        return True  # near_keys.py copies a window's keys; an array can be run as a packed one
    return spec.seq_len_q > _MOST_PADDED and spec.batch > 1 and spec.has("query_seq_lengths")


def _plan(spec: AttentionSpec) -> _Plan:
    """The plan of a call to which the rewrite applies."""
    plan = _Plan.of(spec)
    assert plan is not None
    return plan


@dataclass(frozen=True)
class _Ends:
    """The first and last whole blocks of each row; the arrays are int32 [B]."""

    queries: jax.Array
    """The number of queries in the row."""
    keys: jax.Array
    """The number of keys in the row."""
    first: jax.Array
    """The first whole block."""
    count: jax.Array
    """The number of whole blocks."""
    size: int
    """The number of keys in a block."""

    @staticmethod
    def of(spec: AttentionSpec, operands: NamedArrays, plan: _Plan) -> _Ends:
        queries, keys = (row_lengths(spec, operands, side) for side in ("query", "key"))
        (left, right), size = spec.band, plan.blocks.size
        # `end` follows the last key of the first query; `begin` is the last query's first key.
        end, begin = keys, jnp.zeros_like(keys)
        if right is not None:
            end = jnp.minimum(keys, keys - queries + right + 1)
        if left is not None:
            begin = jnp.maximum(keys - 1 - left, 0)
        end = jnp.where(queries > 0, jnp.maximum(end, 0), 0)
        first = -(-begin // size)
        count = jnp.maximum(end // size - first, 0)
        return _Ends(queries, keys, first, count, size)

    @property
    def begin(self) -> jax.Array:
        """The position of the first key in whole blocks."""
        return self.first * self.size

    @property
    def end(self) -> jax.Array:
        """The position after the last key in whole blocks."""
        return (self.first + self.count) * self.size


def _begin_anywhere(spec: AttentionSpec) -> bool:
    """Whether the whole blocks of different rows begin at different keys, as with a window."""
    return spec.band[0] is not None


def _bias(spec: AttentionSpec, keys: int) -> Arrangement:
    """Shape and dtype of a bias over `keys` keys that are other ones for each batch row; empty if
    the call has none."""
    if not spec.has("bias"):
        return {}
    return {"bias": ((spec.batch, *spec.shape("bias")[1:3], keys), spec.dtype_of("bias"))}


def _bias_at(bias: jax.Array, places: jax.Array) -> jax.Array:
    """The bias at key positions `places` [B, L]. Outside positions are clipped, then masked."""
    at = jnp.clip(places, 0, bias.shape[3] - 1)[:, None, None]
    return jnp.take_along_axis(
        jnp.broadcast_to(bias, (places.shape[0], *bias.shape[1:])), at, axis=3
    )


def _by_kernel(
    spec: AttentionSpec,
    operands: NamedArrays,
    plan: _Plan,
    ends: _Ends,
    beside: AttentionSpec,
    calls: Calls,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, T, N] over the keys after the whole blocks."""
    places = ends.end[:, None] + jnp.arange(plan.after, dtype=jnp.int32)[None]
    key, value = keys_at(spec, operands, places)
    lengths = jnp.maximum(ends.keys - ends.end, 0)
    near = {"key": key, "value": value, "key_value_seq_lengths": lengths}
    if spec.has("query_seq_lengths"):
        near["query_seq_lengths"] = ends.queries
    results = calls.beside(beside, for_(beside, {**operands, **near}))
    return results["out"], jnp.swapaxes(results["lse"], 1, 2)


def _by_xla(
    spec: AttentionSpec,
    operands: NamedArrays,
    plan: _Plan,
    ends: _Ends,
    calls: Calls,
    results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, T, N], with the keys at both ends of the whole blocks."""
    (left, right), length = spec.band, plan.before + plan.after
    before, after = (jnp.arange(x, dtype=jnp.int32)[None] for x in (plan.before, plan.after))
    begin = (ends.begin - plan.before)[:, None]
    places = jnp.concatenate([begin + before, ends.end[:, None] + after], axis=1)
    t = jnp.arange(spec.seq_len_q, dtype=jnp.int32)[None, :, None]
    diagonal = (ends.keys - ends.queries)[:, None, None] + t
    place, keys = places[:, None], ends.keys[:, None, None]
    may_attend = (place >= 0) & (place < keys) & (t < ends.queries[:, None, None])
    if left is not None:
        may_attend &= place >= diagonal - left
    if right is not None:
        may_attend &= place <= diagonal + right
    bias = _bias_at(operands["bias"], places) if spec.has("bias") else None
    if spec.seq_len_q * length <= MOST_MERGED_PAIRS:
        return with_keys_merged(spec, operands, results, places, may_attend, bias)
    key, value = keys_at(spec, operands, places)
    # Values past a length may be NaN, and 0 · NaN would be NaN.
    is_read = may_attend.any(axis=1)[..., None, None]
    near = {name: jnp.where(is_read, x, 0) for name, x in (("key", key), ("value", value))}
    if bias is not None:
        near["bias"] = bias
    rest = changed(
        spec,
        without=(*IN_BLOCKS, *LENGTHS),
        sizes={"s": length},
        made=("key", "value"),
        arrays={"mask": ((spec.batch, 1, spec.seq_len_q, length), "bool"), **_bias(spec, length)},
        meaning=without_band(spec.meaning),
        wanted=replace(spec.wanted, needs_lse=True),
    )
    given = {**operands, **near, "mask": may_attend[:, None]}
    rest_results = calls.xla(rest, for_(rest, given))
    return merged(*results, rest_results["out"], jnp.swapaxes(rest_results["lse"], 1, 2))


WHOLE_PAGES = Rewrite(
    "cache: whole pages by the kernel, the keys at their ends apart",
    _inner,
    _compute,
    asked_of=CACHE,
    adds=IN_BLOCKS,
    when=lambda spec: _Plan.of(spec) is not None,
    beside=_beside,
)
