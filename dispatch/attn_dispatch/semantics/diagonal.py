"""Where the diagonal starts, from which causality, windows and ALiBi count, and the band around it.

The lists of tiles are as long as the band is wide, where there is one, and not as the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.key_ranges import key_range

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


@dataclass(frozen=True)
class KeyBand:
    """The query at place t of its batch row sees no keys but those at t + low … t + high."""

    low: int | None = None
    """None where that side is open."""
    high: int | None = None

    @property
    def width(self) -> int | None:
        """The number of keys that a query can see; None if the band is open on a side."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.low + 1, 0)

    @property
    def ends(self) -> tuple[np.int32, np.int32]:
        """low and high, closer than 2^30, which is farther than any key; 0 where a side is open."""
        low, high = (min(max(x or 0, -(2**30)), 2**30) for x in (self.low, self.high))
        return np.int32(low), np.int32(high)

    def __and__(self, other: KeyBand) -> KeyBand:
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return KeyBand(max(lows, default=None), min(highs, default=None))

    @staticmethod
    def of(spec: AttentionSpec) -> KeyBand:
        """The narrowest band that is known without the arrays."""
        if spec.is_packed and not spec.meaning.same_lengths:
            # A sequence's keys may be anywhere, as seen from its queries.
            return KeyBand()
        band = KeyBand()
        offset = static_offset(spec)
        if offset is not None:
            left, right = spec.band
            band &= KeyBand(
                None if left is None else offset - left, None if right is None else offset + right
            )
        if spec.is_packed:
            longest = min(spec.longest_sequences)
            band &= KeyBand(1 - longest, longest - 1)
        program = spec.meaning.mask_mod
        if program is not None:
            left, right = key_range(program).band
            band &= KeyBand(None if left is None else -left, right)
        return band
