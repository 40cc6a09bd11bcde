"""Copies of ready-made mods, pickled ones included, compute the same in every process."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods

B, T, N, H = 2, 9, 2, 4
_rng = np.random.default_rng(0)


def ready_made() -> dict[str, Any]:
    """One mod of each public function, and some combinations."""
    documents = jnp.asarray([[0, 0, 1, 1, 1, 2, 2, 2, 2], [3] * 9])
    chunks = mods.chunked_window(4)
    return {
        "alibi": mods.alibi(jnp.asarray([0.5, 0.25])),
        "all_of": mods.all_of(chunks, mods.not_(mods.document_mask(documents))),
        "any_of": mods.any_of(chunks, mods.dilated_window(6, 3)),
        "chunked_window": chunks,
        "dilated_window": mods.dilated_window(6, 2),
        "document_mask": mods.document_mask(documents),
        "neighborhood_2d": mods.neighborhood_2d(3, 3, 0),
        "not_": mods.not_(chunks),
        "prefix_lm": mods.prefix_lm(jnp.asarray([3, 0])),
        "relative_position": mods.relative_position(
            jnp.asarray(_rng.normal(size=(8, N)), jnp.float32), max_distance=6
        ),
        "shared_prefix": mods.shared_prefix([3, 2], [[2, 4], [1, 6]], T),
        "soft_cap": mods.soft_cap(1.5),
        "tree_mask": mods.tree_mask(jnp.asarray([-1, 0, 0, 1, 1, 2, 2, 3, 3])),
        "with_query_offset": mods.with_query_offset(chunks, jnp.asarray([1, 2])),
        "of several": mods.with_query_offset(mods.all_of(chunks, mods.dilated_window(6, 2)), 2),
    }


MODS = ready_made()
SCORE_MODS = ("alibi", "relative_position", "soft_cap")

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda mod: pickle.loads(pickle.dumps(mod)),
    "old pickle": lambda mod: pickle.loads(pickle.dumps(mod, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def attend(name: str, mod: Any) -> Any:
    """Output and gradients of a call with this mod."""
    q, k, v = np.random.default_rng(1).normal(size=(3, B, T, N, H)).astype(np.float32)
    kind = "score_mod" if name in SCORE_MODS else "mask_mod"

    def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        out = dot_product_attention(*arrays, **{kind: mod})
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return [np.asarray(x) for x in (out, *gradients)]


def values_of_pairs(name: str, mod: Any) -> np.ndarray:
    """The mod's result for every pair of query and key, [B, N, T, T]."""
    given = (jnp.float32(0.7),) if name in SCORE_MODS else ()
    for i in range(4):
        axes = (None,) * len(given) + tuple(0 if i == j else None for j in (3, 2, 1, 0))
        mod = jax.vmap(mod, axes)
    indices = (jnp.arange(size, dtype=jnp.int32) for size in (B, N, T, T))
    return np.asarray(mod(*given, *indices))


@pytest.mark.parametrize("name", MODS)
def test_copies_return_the_same_values(name: str):
    pairs = values_of_pairs(name, MODS[name])
    assert pairs.std() > 0 or name == "soft_cap"
    for how, copied in COPIES.items():
        np.testing.assert_array_equal(values_of_pairs(name, copied(MODS[name])), pairs, err_msg=how)


@pytest.mark.parametrize("name", ["relative_position", "tree_mask", "of several"])
def test_calls_with_copies_give_the_same_results(name: str):
    expected = attend(name, MODS[name])
    assert np.isfinite(expected[0]).all() and np.abs(expected[1]).max() > 0
    for x, y in zip(attend(name, COPIES["pickle"](MODS[name])), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_every_public_function_is_tested():
    assert set(mods.__all__) == set(MODS) - {"of several"}


def test_mods_can_be_sent_to_other_processes():
    """The standard library's pickle suffices."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.starmap(values_of_pairs, MODS.items())
    for (name, mod), pairs in zip(MODS.items(), found, strict=True):
        np.testing.assert_array_equal(pairs, values_of_pairs(name, mod), err_msg=name)
