"""Ready-made score_mods."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.mod_facts import ModFacts, Size
from attn_dispatch.call.static_arguments import check_bool, static_float
from attn_dispatch.mods.checks import Numbers, check_array, check_int, sizes
from attn_dispatch.programs.functions import ScoreMod


def soft_cap(cap: float) -> ScoreMod:
    """cap · tanh(score / cap), which keeps scores between -cap and cap (arXiv:2408.00118).

    If the call has no other score_mod, `logits_soft_cap` does the same.

    Args:
      cap: a static number above 0, in units of the score.
    """
    cap = static_float("cap", cap)
    if not 0 < cap < math.inf:
        raise ValueError(f"cap: expected a finite number above 0, got {cap}")
    return SoftCap(cap)


@dataclass(frozen=True, eq=False)
class SoftCap:
    cap: float

    def __call__(
        self, score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array
    ) -> jax.Array:
        return self.cap * jnp.tanh(score / self.cap)


def alibi(slopes: Numbers) -> ScoreMod:
    """score - slope · |t - s|, with a slope for each head (arXiv:2108.12409, section 3).

    If the call has no other score_mod, `alibi_slopes` does the same.

    Args:
      slopes: floating [N], in units of the score for each position. Differentiable.
    """
    return Alibi(check_array("slopes", slopes, "floating", ("N",)))


@dataclass(frozen=True, eq=False)
class Alibi:
    slopes: jax.Array

    def __call__(
        self, score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array
    ) -> jax.Array:
        # In the score's dtype: 16 bits would round long distances.
        return score - self.slopes[n].astype(score.dtype) * jnp.abs(t - s)

    @property
    def facts(self) -> ModFacts:
        return ModFacts(sizes("slopes", "N", self.slopes))


def relative_position(
    table: Numbers, *, bidirectional: bool = True, max_distance: int = 128
) -> ScoreMod:
    """T5's position bias: score + table[bucket of s - t, n] (arXiv:1910.10683, section 2.1).

    The paper has 32 buckets, whose ranges grow logarithmically up to a distance of 128. The borders
    are those of T5's weights: half of the buckets hold one distance each, 0, 1, 2, …; the borders
    of the others grow by a constant factor up to max_distance, and the last bucket holds all larger
    distances. A bidirectional table has two such sets: the first for keys at or before the query,
    the second for keys after it.

    T5 does not scale scores: pass scale=1 with its weights.

    Args:
      table: floating [num_buckets, N], in units of the score; T5's num_buckets is 32.
        Differentiable.
      bidirectional: whether keys after the query have separate buckets, as in T5's encoder. If not,
        as in its decoder, they share bucket 0 with the key at the query. That hides no key; pass
        is_causal=True for that.
      max_distance: static, in positions; from there on all distances share a bucket.

    Raises:
      ValueError: the table has too few buckets, or an odd number with bidirectional; or
        max_distance is not above half the buckets of one direction.
    """
    bidirectional = check_bool("bidirectional", bidirectional)
    table = check_array("table", table, "floating", ("num_buckets", "N"))
    num_buckets = table.shape[0]
    if bidirectional and (num_buckets < 4 or num_buckets % 2):
        raise ValueError(f"table: expected an even number of buckets from 4 on, got {num_buckets}")
    if num_buckets < 2:
        raise ValueError(f"table: expected 2 buckets or more, got {num_buckets}")
    in_direction = num_buckets // 2 if bidirectional else num_buckets
    exact = in_direction // 2
    max_distance = check_int("max_distance", max_distance, exact + 1)
    borders = _wide_bucket_borders(exact, in_direction - exact, max_distance)
    return RelativePosition(table, exact, tuple(borders), in_direction if bidirectional else 0)


@dataclass(frozen=True, eq=False)
class RelativePosition:
    table: jax.Array
    exact: int
    """The number of distances that have a separate bucket."""
    borders: tuple[int, ...]
    """The first distances of the wide buckets, from the second one on."""
    first_after: int
    """The first bucket for keys after the query; 0 if there are none."""

    def __call__(
        self, score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array
    ) -> jax.Array:
        distance = jnp.abs(t - s) if self.first_after else jnp.maximum(t - s, 0)
        bucket = jnp.minimum(distance, self.exact)
        for border in self.borders:
            bucket += (distance >= border).astype(bucket.dtype)
        if self.first_after:
            bucket += jnp.where(s > t, self.first_after, 0)
        return score + self.table[bucket, n].astype(score.dtype)

    @property
    def facts(self) -> ModFacts:
        return ModFacts((Size("table", "N", self.table.shape[1]),))


def _wide_bucket_borders(first: int, count: int, last: int) -> list[int]:
    """The first distances of `count` wide buckets from distance `first` on, without the first one.

    Border i is the least distance d >= first · (last / first)^(i / count). It is computed in whole
    numbers, because a float32 logarithm may put a distance on the wrong side.
    """

    def border(i: int) -> int:
        power = first ** (count - i) * last**i
        return bisect_left(range(last), power, key=lambda distance: distance**count)

    return [border(i) for i in range(1, count)]
