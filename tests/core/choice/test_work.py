"""Tiles that kernels compute, against a count over all pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.choice.work import TILE, work_of
from attn_dispatch.inspection import spec_of
from attn_dispatch.programs.numpy_values import may_attend
from attn_dispatch_tools.bench.regret.named_mods import MASK_MODS
from attn_dispatch_tools.verify.seeded_random import SeededRandom


def call(t: int, s: int, n: int = 2, **options: Any) -> AttentionSpec:
    q, k = (jax.ShapeDtypeStruct((2, x, n, 64), jnp.bfloat16) for x in (t, s))
    return spec_of(query=q, key=k, value=k, **options)


def tiles_with(pairs: np.ndarray) -> int:
    t, s = (-(-x // TILE) * TILE for x in pairs.shape)
    whole = np.zeros((t, s), bool)
    whole[: pairs.shape[0], : pairs.shape[1]] = pairs
    return int(whole.reshape(t // TILE, TILE, s // TILE, TILE).any((1, 3)).sum())


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_a_band_are_those_that_have_a_pair(seed: int):
    dice = SeededRandom(f"work/{seed}")
    t, s = dice.between(1, 900), dice.between(1, 900)
    options: dict[str, Any] = {}
    if dice.is_one_in(2):
        options["is_causal"] = True
    if dice.is_one_in(2):
        options["local_window_size"] = (dice.between(0, 500), dice.between(0, 300))
    if options and dice.is_one_in(2):
        options["causal_alignment"] = "bottom_right"
    elif options and t != s:
        options["causal_alignment"] = "top_left"
    spec = call(t, s, **options)
    offset = s - t if spec.meaning.causal_alignment == "bottom_right" else 0
    distance = np.arange(s)[None] - np.arange(t)[:, None] - offset
    left, right = spec.band
    pairs = np.ones((t, s), bool)
    pairs &= True if left is None else distance >= -left
    pairs &= True if right is None else distance <= right
    # A kernel computes the tiles between the first and the last key of a block of queries.
    assert work_of(spec).tiles == pytest.approx(4 * tiles_with(pairs), abs=4 * 2 * -(-t // TILE))
    if not options:
        assert work_of(spec).tiles == 4 * tiles_with(pairs)


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("length", [1000, 4096])
def test_listed_tiles_of_a_mask_mod_are_those_that_it_leaves(name: str, length: int):
    numbers = {"prefix": (300,), "window_and_first": (400, 16), "documents_and_first": (500, 16),
               "images": (256,), "chunks": (512,), "dilated": (600, 2)}[name]  # fmt: skip
    mod = MASK_MODS[name](*numbers)
    spec = call(length, length, mask_mod=mod)
    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None]
    pairs = np.asarray(jnp.broadcast_to(mod(jnp.int32(0), jnp.int32(0), t, s), (length, length)))
    assert work_of(spec).listed == pytest.approx(4 * tiles_with(pairs), rel=0.1)


def test_what_a_mask_mod_reads_from_arrays_is_assumed_to_allow_pairs():
    ends = jnp.array([300, 700])
    program = call(
        1000, 1000, mask_mod=lambda b, n, t, s: (s < ends[b]) & (s <= t)
    ).meaning.mask_mod
    assert program is not None
    t, s = np.arange(1000, dtype=np.int32)[:, None], np.arange(1000, dtype=np.int32)[None]
    zero = np.int32(0)
    assert (may_attend(program, zero, zero, t, s) == (s <= t)).all()
    negated = call(64, 64, mask_mod=lambda b, n, t, s: ~(s < ends[b])).meaning.mask_mod
    assert negated is not None and may_attend(negated, zero, zero, t[:64], s[:, :64]).all()


_FORMULAS: dict[str, tuple[Any, Any]] = {
    "<": (lambda least, most, s: s < least, lambda s: s < 30),
    ">=": (lambda least, most, s: s >= most, lambda s: s >= 30),
    "not <": (lambda least, most, s: ~(s < most), lambda s: s >= 30),
    "not >=": (lambda least, most, s: ~(s >= least), lambda s: s < 30),
    "<, the other way round": (lambda least, most, s: most < s, lambda s: s > 30),
    "<=, the other way round": (lambda least, most, s: most <= s, lambda s: s >= 30),
    "not >, the other way round": (lambda least, most, s: ~(least > s), lambda s: s == s),
    "two": (lambda least, most, s: (s <= least) | (s > most + 0 * s), lambda s: s == s),
    "two bounds": (lambda least, most, s: jnp.maximum(least, 9) > s, lambda s: s < 30),
    "a sum may wrap around": (lambda least, most, s: s < least + 5, lambda s: s == s),
}
"""Conditions on an array's number, min(number, 30) and max(number, 30), and where they may hold."""


@pytest.mark.parametrize("name", _FORMULAS)
def test_minima_and_maxima_bound_what_arrays_hold(name: str):
    formula, expected = _FORMULAS[name]
    ends = jnp.array([300, 700])
    program = call(
        64,
        64,
        mask_mod=lambda b, n, t, s: formula(jnp.minimum(ends[b], 30), jnp.maximum(ends[b], 30), s),
    ).meaning.mask_mod
    assert program is not None
    zero, s = np.int32(0), np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(may_attend(program, zero, zero, zero, s), expected(s))


def test_sequences_and_lengths_count_by_what_is_static():
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    packed = {"query_segment_ids": ids, "is_causal": True}
    alone = work_of(call(4096, 4096, is_causal=True)).tiles
    eight = work_of(call(4096, 4096, **packed, max_segments=8))
    unknown = work_of(call(4096, 4096, **packed))
    assert eight.tiles < unknown.tiles < alone and unknown.assumed
    assert unknown.in_band == alone
    short = work_of(call(4096, 4096, **packed, max_segments=8, max_segment_len=256))
    assert short.tiles < eight.tiles
    lengths = {"key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)}
    assert work_of(call(4096, 4096, **lengths)).tiles < work_of(call(4096, 4096)).tiles
