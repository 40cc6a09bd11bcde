"""Every function of attn_dispatch.mods: dtypes, wrong arguments, and its documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from attn_dispatch.programs.tracing import trace
from tests.support.ready_made_mods import (
    KEY,
    OUT_GRAD,
    PARENTS,
    SLOPES,
    TABLE,
    B,
    Q,
    T,
    V,
    first_two,
    pairs,
)
from tests.support.repository import DOCS


def test_vmap_over_the_array_of_a_mod():
    tables = jnp.stack([TABLE, 2 * TABLE, -TABLE])

    def grad(table: Any) -> jax.Array:
        def loss(table: Any) -> jax.Array:
            mod = mods.relative_position(table, max_distance=6)
            return (dot_product_attention(Q, KEY, V, score_mod=mod) * OUT_GRAD[:, :T]).sum()

        return jax.grad(loss)(table)

    got = jax.jit(jax.vmap(grad))(tables)
    np.testing.assert_allclose(got, [grad(x) for x in tables], rtol=2e-5, atol=2e-5)


READY_MADE: dict[str, Callable[[], Any]] = {
    "soft_cap": lambda: mods.soft_cap(2),
    "alibi": lambda: mods.alibi(SLOPES),
    "relative_position": lambda: mods.relative_position(TABLE),
    "prefix_lm": lambda: mods.prefix_lm(np.arange(B)),
    "document_mask": lambda: mods.document_mask(np.ones((B, T), int)),
    "dilated_window": lambda: mods.dilated_window(6, 3),
    "chunked_window": lambda: mods.chunked_window(4),
    "neighborhood_2d": lambda: mods.neighborhood_2d(3, 3, 1),
    "shared_prefix": lambda: mods.shared_prefix(np.array([3, 2]), np.array([[2, 4], [1, 6]]), T),
    "tree_mask": lambda: mods.tree_mask(PARENTS, np.arange(B)),
    "all_of": lambda: mods.all_of(mods.chunked_window(4), first_two),
    "any_of": lambda: mods.any_of(mods.chunked_window(4), first_two),
    "not_": lambda: mods.not_(first_two),
    "with_query_offset": lambda: mods.with_query_offset(mods.alibi(SLOPES), 3),
}


SCORE_MODS = {"soft_cap", "alibi", "relative_position", "with_query_offset"}


def test_equal_mods_are_one_program():
    """A call whose mod is created again each time is compiled once."""
    assert READY_MADE.keys() == set(mods.__all__)
    for name, make in READY_MADE.items():
        kind = "score_mod" if name in SCORE_MODS else "mask_mod"
        first, second = (trace(kind, make(), (), "float32").program for _ in range(2))
        assert first == second and hash(first) == hash(second), name


@pytest.mark.parametrize("name", READY_MADE)
def test_mods_return_the_same_under_x64(name: str):
    """Indices stay int32; arrays of the user are int64, and scores float32 or float64."""

    def results(dtype: Any) -> np.ndarray:
        mod = READY_MADE[name]()
        if name not in SCORE_MODS:
            return pairs(mod, T, T)
        return pairs(lambda b, n, t, s: mod(jnp.asarray(0.5, dtype), b, n, t, s), T, T)

    narrow = results(jnp.float32)
    with jax.enable_x64(True):
        wide = results(jnp.float64)
    assert wide.dtype == (np.float64 if name in SCORE_MODS else bool)
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)


def test_docs_page_describes_every_mod_and_its_code_runs(capsys):
    """All code of docs/mods.md. tests/docs/test_draw_masks.py checks the page's pictures."""
    page = (DOCS / "mods.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    for snippet in snippets:
        names.pop("out", None)
        exec(snippet, names)
        result = names["table_grad" if "def loss" in snippet else "out"]
        assert bool(jnp.isfinite(result).all()) and bool(result.any()), snippet
    assert "xla" in capsys.readouterr().out  # what explain prints
    code, titles = "\n".join(snippets), "\n".join(re.findall("^## .*$", page, re.MULTILINE))
    for name in mods.__all__:
        assert f"mods.{name}(" in code and f"`{name}(" in titles, name
