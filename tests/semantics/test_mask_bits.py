"""Masks of one bit a pair, against the same masks over all pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics import mask_bits
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch_tools.verify.reference import allowed as reference_allowed
from tests.support import bits
from tests.support.interval_calls import BATCH, HEADS, MODS, Draw, IntervalCall, drawn_calls

CALLS = [x for x in drawn_calls(60, 5) if x.mod or x.layout != "plain"]
MASK_SHAPES = ((1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS))


def check(call: IntervalCall, arrays: dict[str, np.ndarray]) -> None:
    """Assert that the bits of a call are its mask over all pairs."""
    spec = call.spec(arrays)

    @jax.jit
    def both(operands: dict[str, jax.Array]) -> Any:
        mask = allowed(spec, operands, Positions.of(spec, operands))
        return mask_bits.mask_bits(spec, operands), mask

    with jax.numpy_rank_promotion("raise"):
        made, mask = both({x: jnp.asarray(y) for x, y in arrays.items()})
    shape = (BATCH, HEADS, call.t, call.s)
    assert made.dtype == jnp.uint32 and made.shape == mask_bits.bits_shape(spec)
    assert mask_bits.bits_bytes(spec) == made.nbytes
    found = bits.dense(made, call.s)
    np.testing.assert_array_equal(
        np.broadcast_to(found, shape), np.broadcast_to(np.asarray(mask), shape)
    )
    if not call.mod:
        expected = np.broadcast_to(reference_allowed(spec.options, arrays), shape)
        np.testing.assert_array_equal(np.broadcast_to(found, shape), expected)
    np.testing.assert_array_equal(mask_bits.attends(made), found.any(axis=3))
    np.testing.assert_array_equal(mask_bits.seen_keys(made, call.s), found.any(axis=(1, 2)))


def with_mask(call: IntervalCall, rng: Draw, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    return call.draw(rng) | {"mask": rng.rand(*shape) < rng.choice([0.1, 0.5, 0.9])}


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_drawn_calls_agree_with_the_mask_over_all_pairs(number):
    call, rng = CALLS[number], Draw(number)
    for i in range(3):
        check(call, call.draw(rng))
        heads = MASK_SHAPES[(number + i) % len(MASK_SHAPES)]
        check(call, with_mask(call, rng, (*heads, call.t, call.s)))


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
@pytest.mark.parametrize("layout", ["plain", "lengths", "segments", "cu"])
def test_blocks_of_few_queries(monkeypatch, layout: str, rows: int):
    """The last block begins before its place: 12 is no multiple of 5 and 11."""
    call, rng = IntervalCall(layout, 12, 9, {"max_segments": 4}, "product"), Draw(rows)
    if layout != "segments":
        call.facts.clear()
    for shape in ((1, 1, 12, 9), (BATCH, HEADS, 12, 1), (1, HEADS, 1, 9)):
        arrays = with_mask(call, rng, shape)
        batch, heads, *_ = mask_bits.bits_shape(call.spec(arrays))
        monkeypatch.setattr(mask_bits, "_BLOCK_PAIRS", batch * heads * 9 * rows)
        check(call, arrays)


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 70])
def test_keys_that_do_not_fill_words(keys: int):
    call = IntervalCall("plain", 3, keys)
    check(call, with_mask(call, Draw(keys), (1, 1, 3, keys)))


def test_a_mod_that_differs_by_head_or_row_has_bits_for_each(monkeypatch):
    for mod, expected in {
        lambda b, n, t, s: s <= t + 3 * n: (1, HEADS),
        lambda b, n, t, s: s <= t + 3 * b: (BATCH, 1),
        lambda b, n, t, s: s <= t + 3 * b * n: (BATCH, HEADS),
        lambda b, n, t, s: t * s < 20: (1, 1),
    }.items():
        monkeypatch.setitem(MODS, "drawn", (mod, ()))
        call = IntervalCall("plain", 12, 9, mod="drawn")
        arrays = call.draw(Draw(0))
        assert mask_bits.bits_shape(call.spec(arrays))[:2] == expected
        check(call, arrays)


def test_no_array_has_all_pairs_of_a_long_call():
    tokens = 2**15
    call = IntervalCall("plain", tokens, tokens, {"is_causal": True}, "product")
    arrays: Any = {x: jax.ShapeDtypeStruct(y.shape, y.dtype) for x, y in call.draw(Draw(0)).items()}
    spec = call.spec(arrays)
    jaxpr = jax.make_jaxpr(lambda x: mask_bits.mask_bits(spec, x))(arrays)
    inside = [x.params["jaxpr"] for x in jaxpr.eqns if x.primitive.name == "scan"]
    (block,) = inside
    sizes = [y.aval.size for x in block.jaxpr.eqns for y in x.outvars]
    assert max(sizes) == mask_bits._BLOCK_PAIRS
    assert max(y.aval.size for x in jaxpr.eqns for y in x.outvars) == tokens * tokens // 32
