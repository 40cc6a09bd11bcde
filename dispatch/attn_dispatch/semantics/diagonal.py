"""Where the diagonal starts, from which causality, windows and ALiBi count."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from attn_dispatch.call.spec import AttentionSpec

Numbers = jax.Array | int
"""int32 [1|B, 1|T], or one number for all."""


def offset_of(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], more_keys: Callable[[], Numbers]
) -> Numbers:
    """The key that is level with query 0 of its sequence, which may be before the first key or
    after the last.

    `more_keys` returns the number of keys of the sequence minus that of its queries.
    """
    if spec.has("causal_offset"):
        return operands["causal_offset"][:, None]
    if spec.meaning.causal_alignment == "bottom_right":
        return more_keys()
    return spec.meaning.causal_offset


def diagonal_of(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    positions: jax.Array,
    more_keys: Callable[[], Numbers],
) -> jax.Array:
    """The keys that are level with the queries at these positions; `more_keys` as above."""
    if spec.meaning.causal_alignment == "top_left":
        return positions
    return positions + offset_of(spec, operands, more_keys)


def static_offset(spec: AttentionSpec) -> int | None:
    """The key that is level with query 0 of each sequence; None if that depends on arrays."""
    if spec.has("causal_offset"):
        return None
    if spec.meaning.causal_alignment != "bottom_right":
        return spec.meaning.causal_offset
    if spec.meaning.same_lengths:
        return 0
    return None if spec.has_runtime_lengths else spec.seq_len_kv - spec.seq_len_q
