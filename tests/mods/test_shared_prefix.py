"""shared_prefix against its definition, against separate sequences, and what runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, mods
from attn_dispatch.core.choice.work import work_of
from attn_dispatch.core.rewrites.mods_as_arrays import MASK_MOD_AS_MASK
from attn_dispatch.fa4 import compiled
from attn_dispatch.inspection import spec_of
from attn_dispatch.semantics.intervals import has_intervals
from tests.support.backend import needs_cudnn
from tests.support.fa4_on_cpu import LIBRARY, for_h200, install
from tests.support.present import present

T = 24
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "one prompt": ([5, 1, 0], [[4, 3, 12], [0, 2, 0], [7, 0, 1]]),
    "no room left": ([8], [[8, 8]]),
    "two prompts": ([[3, 4], [0, 2]], [[[2, 3], [4, 5]], [[6, 1], [0, 0]]]),
}


def by_definition(prompts: Any, completions: Any) -> dict[str, np.ndarray]:
    """The mask [B, T, T] and the arrays of each token, from one token to the next."""
    prompts, completions = np.asarray(prompts), np.asarray(completions)
    batch = len(prompts)
    found = {
        "mask": np.zeros((batch, T, T), bool),
        "positions": np.zeros((batch, T), int),
        "completions": np.full((batch, T), -1),
        "previous": np.tile(np.arange(T), (batch, 1)),
    }
    for row in range(batch):
        place = number = 0
        answers = completions[row].reshape(-1, completions.shape[-1])
        for prompt, lengths in zip(prompts[row].reshape(-1), answers, strict=True):
            context = list(range(place, place + prompt))
            for length, kind in [(prompt, -1), *((x, number + i) for i, x in enumerate(lengths))]:
                before = [] if kind < 0 else context
                for own in range(length):
                    keys = [*before, *range(place, place + own + 1)]
                    found["mask"][row, place + own, keys] = True
                    found["positions"][row, place + own] = len(keys) - 1
                    found["completions"][row, place + own] = kind
                    found["previous"][row, place + own] = keys[-2] if len(keys) > 1 else keys[-1]
                place += length
            number += len(lengths)
    return found


def mask_of(mod: Any, batch: int) -> np.ndarray:
    b, t, s = np.ogrid[:batch, :T, :T]
    return np.asarray(mod(*(jnp.asarray(x, jnp.int32) for x in (b, 0, t, s))))


@pytest.mark.parametrize("bounds", [{}, {"max_prompt_len": 8, "max_completion_len": 12}])
@pytest.mark.parametrize("name", LAYOUTS)
def test_masks_and_arrays_agree_with_their_definition(name: str, bounds: dict[str, int]):
    prompts, completions = LAYOUTS[name]
    expected = by_definition(prompts, completions)
    made = jax.jit(lambda *x: vars(mods.shared_prefix(*x, T, **bounds)) | {"bounds": 0})
    traced = made(np.asarray(prompts), np.asarray(completions))
    mod = mods.shared_prefix(prompts, completions, T, **bounds)
    np.testing.assert_array_equal(mask_of(mod, len(prompts)), expected.pop("mask"))
    for name, array in expected.items():
        np.testing.assert_array_equal(getattr(mod, name), array, name)
        np.testing.assert_array_equal(traced[name], array, name)
        assert getattr(mod, name).dtype == jnp.int32


N, K, H = 4, 2, 8


def separate(arrays: Any, prompt: int, lengths: list[int]) -> jax.Array:
    """Each completion behind its own copy of the prompt; the results in the places of the row."""
    outs = []
    for i, length in enumerate([0, *lengths]):
        start = prompt + sum(lengths[: i - 1]) if i else prompt
        q, k, v = (jnp.concatenate([x[:prompt], x[start : start + length]]) for x in arrays)
        k, v = (jnp.repeat(x, N // K, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) / H**0.5
        weights = jax.nn.softmax(jnp.where(np.tri(len(q), dtype=bool), scores, -jnp.inf))
        outs.append(jnp.einsum("nts,snh->tnh", weights, v)[prompt if i else 0 :])
    out = jnp.concatenate(outs)
    return jnp.pad(out, ((0, T - len(out)), (0, 0), (0, 0)))


def results(call: Any, arrays: Any, weights: jax.Array) -> Any:
    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = call(*arrays)
        return (out * weights).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


def drawn(dtype: Any) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(2, T, x, H)), dtype) for x in (N, K, K, N)]


PROMPTS, COMPLETIONS = [5, 8], [[4, 3, 9], [8, 0, 7]]


def expected_results() -> Any:
    """In float64. The prompts' gradients are the sums of those of all copies."""
    with jax.enable_x64(True):
        *arrays, weights = (x.astype(jnp.float64) for x in drawn(jnp.float64))
        pairs = list(zip(PROMPTS, COMPLETIONS, strict=True))

        def all_rows(*arrays: jax.Array) -> jax.Array:
            rows = zip(*arrays, strict=True)
            return jnp.stack([separate(x, *y) for x, y in zip(rows, pairs, strict=True)])

        return [np.asarray(x) for x in results(all_rows, arrays, weights)]


def test_results_and_gradients_are_those_of_separate_sequences(monkeypatch):
    """By XLA in float64, and by a copy of fa4's kernels in float32."""
    expected = expected_results()

    def attend(*arrays: jax.Array) -> jax.Array:
        mod = mods.shared_prefix(jnp.asarray(PROMPTS), jnp.asarray(COMPLETIONS), T)
        return dot_product_attention(*arrays, mask_mod=mod)

    with jax.enable_x64(True):
        *arrays, weights = drawn(jnp.float64)
        for x, y in zip(results(attend, arrays, weights), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
    install(monkeypatch)
    *arrays, weights = drawn(jnp.float32)
    with for_h200():
        for x, y in zip(results(attend, arrays, weights), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


LONG = 4096
SHAPES: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((1, LONG, heads, 128), jnp.bfloat16)
    for name, heads in (("query", 32), ("key", 8), ("value", 8))
}


def long_mask(prompts: int = 1, **bounds: int) -> Any:
    """A prompt of 1,024 tokens and 8 completions of 352; or as many prompts, and shorter ones."""
    of_prompts = np.full((1, prompts), 1024 // prompts)
    of_completions = np.full((1, prompts, 8), 352 // prompts)
    return mods.shared_prefix(of_prompts, of_completions, LONG, **bounds)


def test_fa4_runs_it_as_two_ranges_and_skips_tiles(monkeypatch):
    wide = [replace(x, name="128_128", head_dim=128, head_dim_v=128) for x in LIBRARY.sets]
    monkeypatch.setattr(compiled, "find", lambda: replace(LIBRARY, sets=tuple(wide)))
    found = explain(**SHAPES, mask_mod=long_mask(), target="h100", implementation="fa4")
    assert (found.chosen_forward, found.chosen_backward) == ("fa4", "fa4")
    share = present(found.mask)
    assert (share.tiles, share.computed) == pytest.approx((0.264, 0.516), abs=0.001)
    for prompts in (1, 2):
        assert has_intervals(spec_of(**SHAPES, mask_mod=long_mask(prompts)))


@needs_cudnn
def test_cudnn_compares_for_each_score_of_a_causal_call():
    """With several prompts its backward pass has one array more than it can read."""
    for prompts, rewrites in ((1, ()), (2, (MASK_MOD_AS_MASK.name,))):
        found = explain(
            **SHAPES, mask_mod=long_mask(prompts), target="h100", implementation="cudnn"
        )
        (forward,), (backward,) = found.forward, found.backward
        assert (forward.reasons, forward.rewrites) == (backward.reasons, ()) == ((), ())
        assert backward.rewrites == rewrites


@pytest.mark.parametrize("prompts", [1, 2])
def test_aiter_takes_it_as_an_array_and_xla_as_it_is(prompts: int):
    found = explain(**SHAPES, mask_mod=long_mask(prompts), target="mi300x")
    verdicts = {x.implementation: x for x in found.backward}
    assert (found.chosen_forward, verdicts["xla"].reasons) == ("aiter", ())
    assert any("mask_mod" in x for x in verdicts["aiter"].rewrites)


def test_bounds_let_the_model_of_time_see_the_share():
    def work(prompts: int, **bounds: int) -> Any:
        return work_of(spec_of(**SHAPES, mask_mod=long_mask(prompts, **bounds)))

    unbounded, bounded = work(1), work(1, max_prompt_len=1024, max_completion_len=352)
    assert unbounded.listed == unbounded.tiles == bounded.tiles
    # Each query may see the prompt, and 1,024 keys up to its own.
    assert bounded.listed < 0.8 * bounded.tiles
    # With several prompts in a row all kernels skip what is before the longest one.
    both = work(2, max_prompt_len=512, max_completion_len=176)
    assert both.tiles < 0.8 * unbounded.tiles and both.listed <= both.tiles


WRONG: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "completion_lengths: expected lengths from 0 to 24, got -1": ([3], [[2, -1]], {}),
    "prompt_lengths: expected lengths from 0 to 2, got 3": ([3], [[2]], {"max_prompt_len": 2}),
    "completion_lengths: expected lengths from 0 to 4, got 5": (
        [3], [[5]], {"max_completion_len": 4},
    ),
    "length: expected at least 25, the tokens of a row, got 24": ([3, 5], [[5, 9], [7, 13]], {}),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_lengths_raise_or_are_padding(message: str, monkeypatch):
    prompts, completions, bounds = WRONG[message]
    with pytest.raises(ValueError, match=message):
        mods.shared_prefix(prompts, completions, T, **bounds)

    @jax.jit
    def numbers(prompts: Any, completions: Any) -> jax.Array:
        return mods.shared_prefix(prompts, completions, T, **bounds).first[-1]

    given = np.asarray(prompts), np.asarray(completions)
    assert (numbers(*given) == T).all()
    monkeypatch.setenv("ATTN_DISPATCH_CHECK", "1")
    jax.clear_caches()
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(numbers(*given))
        jax.effects_barrier()


def test_a_wrong_traced_length_leaves_other_prompts_alone():
    prompts, completions = np.array([[3, 4]]), np.array([[[2, 3], [4, 30]]])
    made = jax.jit(lambda *x: mods.shared_prefix(*x, T).positions)
    expected = by_definition([[3]], [[[2, 3]]])["positions"]
    np.testing.assert_array_equal(made(prompts, completions), expected)
