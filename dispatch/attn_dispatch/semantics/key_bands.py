"""The static band of a call: how far the keys that a query sees are from its own place.

The lists of tiles are as long as the band is wide, where there is one, and not as the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.semantics.diagonal import static_offset


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
        found = KeyBand()
        offset = static_offset(spec)
        if offset is not None:
            left, right = spec.band
            found &= KeyBand(
                None if left is None else offset - left, None if right is None else offset + right
            )
        if spec.is_packed:
            longest = min(spec.longest_sequences)
            found &= KeyBand(1 - longest, longest - 1)
        program = spec.meaning.mask_mod
        if program is not None:
            left, right = key_range(program).band
            found &= KeyBand(None if left is None else -left, right)
        return found
