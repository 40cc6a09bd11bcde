"""The custom calls of compiled FlashAttention-4, over stand-ins for the kernels that compute.

The stand-ins visit the tiles that lists name, so a wrong stride, a wrong order of arrays, or
scratch of another size gives wrong numbers. Results and scratch are filled with NaN before.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import mods
from attn_dispatch.fa4 import compiled, interval_calls
from attn_dispatch.fa4.interval_calls import NO_CHANGE, Change
from tests.support import bits, score_mods
from tests.support import interval_attention as attention
from tests.support import interval_masks as intervals
from tests.support import interval_runs as runs
from tests.support.fa4_emulated import emulated, needs_computing_kernels
from tests.support.interval_runs import seen_by

pytestmark = [needs_computing_kernels, pytest.mark.usefixtures("kernels_that_compute")]

# Batch, query rows, keys, query heads, key heads; dims; dtype.
GROUPED = ((2, 290, 290, 4, 2), (64, 64), "bfloat16")
ALONE = ((2, 200, 260, 2, 2), (192, 128), "bfloat16")
NARROW = ((1, 150, 150, 3, 1), (72, 40), "float16")


def _results(
    inputs: attention.Inputs, mask: np.ndarray, scale: float, change: Change = NO_CHANGE
) -> attention.Results:
    operands = runs.mask_operands(mask, inputs, change.variant)
    return runs.results(inputs, operands, scale, change.variant, change.arrays)


def _wrong(
    inputs: attention.Inputs,
    mask: np.ndarray,
    got: attention.Results,
    scale: float,
    mod: attention.ScoreMod | None = None,
) -> list[attention.Check]:
    return [x for x in runs.checks(inputs, mask, got, scale, mod) if not x.is_right]


def _drawn(case) -> attention.Inputs:
    return attention.drawn(0, *case)


@pytest.mark.parametrize("mask", list(intervals.masks(0, 1, 290, 290)))
def test_every_kind_of_mask(mask: str):
    inputs = _drawn(GROUPED)
    rows = intervals.masks(0, 2, 290, 290)[mask]
    assert _wrong(inputs, rows, _results(inputs, rows, 0.1), 0.1) == []


SLOPES = jnp.asarray([0.01, 0.03, 0.002, 0.05], jnp.bfloat16)
CHANGES = {
    "soft cap": (mods.soft_cap(3.0), "soft_cap(3.0)", ()),
    "ALiBi": (mods.alibi(SLOPES), "alibi([1.0])", (SLOPES,)),
    "two arrays": (
        score_mods.by_head_and_place,
        "by_head_and_place",
        (jnp.zeros((1, 2), jnp.int32), score_mods.DEPTHS[None], score_mods.GAINS[None]),
    ),
}
"""Mods, what the names of their sets end in, and the arrays that they read."""


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("case", [GROUPED, NARROW], ids=["grouped", "padded"])
def test_a_change_of_scores(case, name: str):
    mod, ending, read = CHANGES[name]
    variants = {x.variant for x in emulated().library.sets if x.variant_name.endswith(ending)}
    change = Change(variants.pop(), read)
    inputs = _drawn(((*case[0][:3], 4, 2), (64, 64), case[2]))
    rows = intervals.masks(0, *case[0][:3])["blocky"]
    for mask in (rows, seen_by(rows, case[0][2])):
        assert _wrong(inputs, mask, _results(inputs, mask, 0.4, change), 0.4, mod) == []
    assert _wrong(inputs, rows, _results(inputs, rows, 0.4), 0.4, mod)


@pytest.mark.parametrize("case", [GROUPED, ALONE, NARROW], ids=["grouped", "alone", "padded"])
@pytest.mark.parametrize("rows", ["one", "each"])
@pytest.mark.parametrize("mask", ["few rows", "random"])
def test_sinks(case, rows: str, mask: str):
    """Under masks with rows that see no key, by both forms of them."""
    inputs, (batch, length, keys, heads, _) = _drawn(case), case[0]
    sinks = 4 * jax.random.normal(jax.random.key(1), (batch if rows == "each" else 1, heads))
    inputs = replace(inputs, sinks=sinks)
    made = intervals.masks(2, batch, length, keys)[mask]
    for one in (made, seen_by(made, keys)):
        got = _results(inputs, one, 0.1)
        assert _wrong(inputs, one, got, 0.1) == []
    assert _wrong(replace(inputs, sinks=sinks + 0.1), made, got, 0.1)
    assert jnp.isneginf(got[1]).any()


def test_sinks_of_16_bits_are_taken_exactly():
    inputs, rows = _drawn(NARROW), intervals.causal(150, 150)
    sinks = jnp.asarray([[1.3, -2.7, 5.1]], "bfloat16")
    narrow, wide = (
        _results(replace(inputs, sinks=x), rows, 0.1) for x in (sinks, sinks.astype("float32"))
    )
    for x, y in zip(narrow[:5], wide[:5], strict=True):
        assert (x == y).all()


@pytest.mark.parametrize("name", CHANGES)
def test_sinks_beside_a_change_of_scores(name: str):
    mod, ending, read = CHANGES[name]
    variants = {x.variant for x in emulated().library.sets if x.variant_name.endswith(ending)}
    change = Change(variants.pop(), read)
    inputs = replace(_drawn(GROUPED), sinks=jnp.asarray([[1.0, -2.0, 5.0, 0.0]]))
    rows = intervals.masks(0, *GROUPED[0][:3])["blocky"]
    assert _wrong(inputs, rows, _results(inputs, rows, 0.4, change), 0.4, mod) == []


def test_sinks_of_minus_infinity_are_none_and_large_ones_take_everything():
    inputs = _drawn(NARROW)
    rows = intervals.masks(2, *NARROW[0][:3])["few rows"]
    none = replace(inputs, sinks=jnp.full((1, 3), -jnp.inf))
    *got, dsinks = _results(none, rows, 0.1)
    for x, y in zip(got, _results(inputs, rows, 0.1), strict=True):
        assert (x == y).all()
    assert (dsinks == 0).all()
    large = replace(inputs, sinks=jnp.full((1, 3), 1e5))
    out, lse, *gradients, dsinks = _results(large, rows, 0.1)
    assert all((x == 0).all() for x in (out, *gradients))
    is_live = jnp.asarray(seen_by(rows, 150).any(axis=3))
    assert (lse == jnp.where(is_live, 1e5, -jnp.inf)).all()
    expected = jnp.where(is_live, inputs.lse_grad, 0).sum(axis=(0, 2))
    np.testing.assert_allclose(dsinks[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [ALONE, NARROW], ids=["two head dims", "padded"])
@pytest.mark.parametrize("mask", ["window and sinks", "blocky"])
def test_other_heads_lengths_and_dtypes(case, mask: str):
    inputs = _drawn(case)
    rows = intervals.masks(1, *case[0][:3])[mask]
    got = _results(inputs, rows, 0.1)
    assert _wrong(inputs, rows, got, 0.1) == []
    assert [x.shape for x in got[2:]] == [x.shape for x in (inputs.query, inputs.key, inputs.value)]


@pytest.mark.parametrize("case", [GROUPED, ALONE, NARROW], ids=["grouped", "alone", "padded"])
@pytest.mark.parametrize("masks", ["one", "rows", "heads", "both"])
def test_masks_of_one_bit_a_pair(case, masks: str):
    inputs, (batch, length, keys, heads, _) = _drawn(case), case[0]
    shape = (batch if masks in ("rows", "both") else 1, heads if masks in ("heads", "both") else 1)
    seen = bits.drawn(np.random.default_rng(0), (*shape, length, keys))
    assert _wrong(inputs, seen, _results(inputs, seen, 0.1), 0.1) == []


def test_rows_and_the_bits_of_their_pairs_are_one_mask():
    inputs = _drawn(GROUPED)
    for rows in intervals.masks(0, 2, 290, 290).values():
        dense = intervals.dense(rows, 290)[:, None]
        for x, y in zip(_results(inputs, rows, 0.1), _results(inputs, dense, 0.1), strict=True):
            assert (x == y).all()


def test_the_judge_notices_another_scale_and_another_mask():
    inputs = _drawn(NARROW)
    causal, window = intervals.causal(150, 150), intervals.window(150, 150, 149)
    got = _results(inputs, causal, 0.1)
    assert {x.name for x in _wrong(inputs, causal, got, 0.105)} == {*attention.NAMES[:5]}
    assert _wrong(inputs, window, got, 0.1)


def test_a_row_that_sees_nothing_has_output_0_lse_minus_infinity_and_gradient_0():
    inputs = _drawn(GROUPED)
    rows = intervals.causal(290, 290).copy()
    rows[:, 100:200] = 0
    out, lse, dq, *_ = _results(inputs, rows, 0.1)
    assert (out[:, 100:200] == 0).all() and (dq[:, 100:200] == 0).all()
    assert (lse[:, :, 100:200] == -jnp.inf).all() and jnp.isfinite(lse[:, :, :100]).all()


def test_without_a_gradient_of_lse_it_is_zero():
    inputs = _drawn(NARROW)
    rows = intervals.causal(150, 150)
    zero = attention.Inputs(
        inputs.query, inputs.key, inputs.value, inputs.out_grad, jnp.zeros_like(inputs.lse_grad)
    )
    none = attention.Inputs(inputs.query, inputs.key, inputs.value, inputs.out_grad, None)
    for x, y in zip(_results(zero, rows, 0.1), _results(none, rows, 0.1), strict=True):
        assert (x == y).all()


def test_only_calls_of_grouped_heads_have_sums_of_key_gradients():
    library = emulated().library
    kernels = library.set_for(96, 96, "float16")
    assert kernels is not None
    query = jax.ShapeDtypeStruct((2, 100, 8, 96), "float16")
    alone, grouped = (jax.ShapeDtypeStruct((2, 100, x, 96), "float16") for x in (8, 2))
    rows = 4 * 2 * 8 * 128 * (1 + 1 + 96)
    assert interval_calls.scratch_bytes(kernels, query, alone) == rows
    sums = 4 * 2 * 2 * 128 * (96 + 96)
    assert interval_calls.scratch_bytes(kernels, query, grouped) == rows + sums


def test_arrays_without_a_set_are_refused():
    sentence = (
        r"head dims and dtype: expected at most those of a compiled set of FlashAttention-4's "
        r"kernels for sm90 \(head dims 64, 192/128 in bfloat16; head dims 64, 96 in float16; head "
        r"dims 64 in bfloat16 and float16 with attn_.*\), got 256/256 bfloat16"
    )
    arrays = [jax.ShapeDtypeStruct((1, 8, 2, 256), "bfloat16")] * 2
    with pytest.raises(ValueError, match=sentence):
        interval_calls.forward_set(*arrays)
    grouped = [jax.ShapeDtypeStruct((1, 8, x, 192), "bfloat16") for x in (4, 2)]
    narrow = jax.ShapeDtypeStruct((1, 8, 2, 128), "bfloat16")
    assert interval_calls.forward_set(grouped[0], narrow).name == "sm90_d192_128_bfloat16"
    with pytest.raises(ValueError, match="got 192/128 bfloat16"):
        interval_calls.backward_set(grouped[0], narrow)


def test_kernels_that_cannot_be_used_say_why(monkeypatch):
    library = compiled.CompiledLibrary(None, unusable_reason="nobody built it")
    monkeypatch.setattr(compiled, "find", lambda: library)
    arrays = [jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")] * 2
    with pytest.raises(RuntimeError, match="nobody built it"):
        interval_calls.forward_set(*arrays)


def test_shapes_that_disagree_are_errors_of_the_handlers():
    inputs = _drawn(NARROW)
    rows = intervals.causal(150, 150)
    short = rows[:, :149]
    lists = [jnp.asarray(x) for x in intervals.lists(intervals.dense(rows, 150), 192, 128)]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"rows: expected int32 \[1, 150, 4\], got"
    ):
        interval_calls.forward(
            inputs.query, inputs.key, inputs.value, jnp.asarray(short), lists, 0.1
        )
