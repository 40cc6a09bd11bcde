"""The mask of a call as intervals: at most two ranges of keys for each query.

Everything but the evaluation of unknown mask_mods (evaluated_intervals.py) takes O(B · T) time and
memory, also at a million tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.evaluated_intervals import evaluated
from attn_dispatch.semantics.interval_rules import is_evaluated, not_supported_reasons
from attn_dispatch.semantics.interval_union import MOST_INTERVALS, any_of, union
from attn_dispatch.semantics.key_spans import KeySpans
from attn_dispatch.semantics.mod_intervals import known_set, mod_ranges

__all__ = ["Intervals", "not_supported_reasons"]


@dataclass(frozen=True)
class Intervals:
    """The keys that each query sees.

    A query of padding, or of an invalid row (invalid_values.py), sees none.
    """

    rows: jax.Array
    """int32 [1|B, T, 4]: (start, length, start, length), in the normal form of interval_union.py.
    Starts are within 0 … S. A batch axis of 1 stands for all batch rows."""
    unknown: jax.Array | None
    """bool scalar: some query sees keys in more intervals, or in ways that only its pairs tell, so
    the rows are not its mask. None: that cannot be."""
    most: int | None
    """The most intervals that a row can have, 0, 1 or 2; None if only `unknown` tells."""

    @property
    def attends(self) -> jax.Array:
        """bool [1|B, T]: the query sees some key."""
        return (self.rows[..., 1] > 0) | (self.rows[..., 3] > 0)

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Intervals:
        """The intervals of a call that breaks no rule of interval_rules.py."""
        if spec.meaning.mask_mod is None:
            spans = KeySpans.of(spec, operands)
            rows, _ = union([spans.within(None, None)])
            return Intervals(_with_rows(spec, rows), spans.is_scattered, 1)
        terms = known_set(spec)
        if terms is None:
            rows, unknown = evaluated(spec, operands)
            return Intervals(rows, unknown, None)
        spans = KeySpans.of(spec, operands)
        if not terms:
            return Intervals(jnp.zeros((1, spec.seq_len_q, 4), jnp.int32), None, 0)
        ranges, is_no_range = mod_ranges(spec, operands, spans, terms)
        rows, has_more = union(ranges)
        has_more = None if has_more is None else has_more.any()
        unknown = any_of(spans.is_scattered, is_no_range, has_more)
        most = min(len(terms), MOST_INTERVALS) if has_more is None else None
        return Intervals(_with_rows(spec, rows), unknown, most)


@lru_cache(maxsize=1024)
def is_certain(spec: AttentionSpec) -> bool:
    """Whether `rows` are the mask of a call whatever its arrays hold: `unknown` is None.

    The call breaks no rule of interval_rules.py.
    """
    if is_evaluated(spec):
        return False
    arrays = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.operands}

    def unknown(operands: Mapping[str, jax.Array]) -> jax.Array | None:
        return Intervals.of(spec, operands).unknown

    return jax.eval_shape(unknown, arrays) is None


def _with_rows(spec: AttentionSpec, rows: jax.Array) -> jax.Array:
    """[1|B, 1|T, 4] as [1|B, T, 4]."""
    return jnp.broadcast_to(rows, (rows.shape[0], spec.seq_len_q, rows.shape[2]))
