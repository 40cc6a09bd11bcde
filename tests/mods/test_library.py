"""Every function of attn_dispatch.mods: dtypes, wrong arguments, and its documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods, serving
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


_MASK = mods.chunked_window(4)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (mods.soft_cap, (0,), "cap: expected a finite number above 0, got 0.0"),
        (mods.soft_cap, (np.inf,), "cap: expected a finite number above 0, got inf"),
        (mods.soft_cap, (SLOPES,), "cap: expected a static number, got Array"),
        (mods.alibi, (SLOPES[None],), r"slopes: expected an array \[N\] of floating dtype, got f"),
        (mods.alibi, ([1, 2],), r"of floating dtype, got int32\[2\]"),
        (mods.relative_position, (SLOPES,), r"table: expected an array \[num_buckets, N\]"),
        (mods.relative_position, (TABLE[:7],), "an even number of buckets from 4 on, got 7"),
        (mods.relative_position, (TABLE[:2],), "an even number of buckets from 4 on, got 2"),
        (
            mods.prefix_lm,
            (2.5,),
            r"prefix_lengths: expected an array \[\] or \[B\] of integer dtype, got float32\[\]",
        ),
        (mods.prefix_lm, ("3",), r"prefix_lengths: expected an array \[\] or \[B\] .*, got '3'"),
        (
            mods.shared_prefix,
            ([3], [[1], [2, 3]], 9),
            r"completion_lengths: .*, got \[\[1\], \[2, 3",
        ),
        (mods.prefix_lm, (-1,), "prefix_lengths: expected a static int from 0 on, got -1"),
        (mods.prefix_lm, (SLOPES,), r"of integer dtype, got float32\[4\]"),
        (mods.document_mask, ([1, 1],), r"query_documents: expected an array \[B, T\]"),
        (mods.document_mask, ([[1]], [1]), r"key_documents: expected an array \[B, S\]"),
        (mods.document_mask, ([[1], [2]], [[1]]), "key_documents: expected 2 batch rows, .* got 1"),
        (mods.dilated_window, (-1, 2), "left: expected a static int from 0 on, got -1"),
        (mods.dilated_window, (3, 0), "dilation: expected a static int from 1 on, got 0"),
        (mods.chunked_window, (2.5,), "chunk: expected a static int from 1 on, got 2.5"),
        (mods.chunked_window, (True,), "chunk: expected a static int from 1 on, got True"),
        (mods.chunked_window, (2**31,), "chunk: expected a static int below 2.31, got 2147483648"),
        (mods.neighborhood_2d, (0, 3, 1), "height: expected a static int from 1 on, got 0"),
        (mods.neighborhood_2d, (5, 4, 2), "a square of 5 x 5 that fits the grid, got 5 x 4"),
        (mods.shared_prefix, (3, [[1]], 9), r"prompt_lengths: expected an array \[B\] or \[B, P\]"),
        (mods.shared_prefix, ([3], [1], 9), r"completion_lengths: expected an array \[B, G\] or"),
        (
            mods.shared_prefix,
            ([3], [[1], [2]], 9),
            r"expected an array \[1, G\] for .*got \[2, 1\]",
        ),
        (mods.shared_prefix, ([3], [[1]], 2.5), "length: expected a static int from 1 on, got 2.5"),
        (mods.tree_mask, ([[[0]]],), r"parents: expected an array \[T\] or \[B, T\] of integer"),
        (mods.tree_mask, ([-1, 1],), "-1 or an earlier token for each token, got 1 for token 1"),
        (mods.tree_mask, ([-1, 0, -2],), "got -2 for token 2"),
        (mods.tree_mask, ([-1], -3), "cache_length: expected a static int from 0 on, got -3"),
        (mods.tree_mask, ([-1], 2.5), r"cache_length: expected an array \[\] or \[B\] of integer"),
        (mods.all_of, (), "all_of: expected one mask or more, got none"),
        (mods.any_of, (_MASK, True), "any_of: expected functions, got True"),
        (mods.not_, (3,), "not_: expected functions, got 3"),
        (mods.not_, (mods.soft_cap(3.0),), r"of \(b, n, t, s\), got one of \(score, b, n, t, s\)"),
        (mods.soft_cap, ("3",), "cap: expected a static number, got str"),
        (mods.with_query_offset, (_MASK, -1), "offset: expected a static int from 0 on, got -1"),
        (mods.with_query_offset, (_MASK, SLOPES), r"offset: expected an array \[\] or \[B\]"),
    ],
)
def test_wrong_arguments_raise(function: Any, arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [(mods, "prefixlm", "prefix_lm"), (mods, "slidingwindow", None), (mods, "alibis", "alibi"),
     (serving, "free_behnd", "free_behind"), (serving, "beam", None)],
)  # fmt: skip
def test_an_unknown_name_gets_the_one_that_is_meant(module: Any, name: str, meant: str | None):
    hint = "$" if meant is None else rf"; did you mean '{meant}'\?$"
    with pytest.raises(
        AttributeError, match=f"'{module.__name__}' has no attribute '{name}'{hint}"
    ):
        getattr(module, name)


def test_traced_static_arguments_raise():
    for function in (mods.soft_cap, mods.chunked_window):
        with pytest.raises(ValueError, match="expected a static"):
            jax.jit(lambda x, function=function: function(x)(*[jnp.int32(0)] * 4))(3)


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
