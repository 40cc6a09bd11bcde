"""`paged_attention`: the public call, what it refuses, and how it lowers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, explain, inspection, paged_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.cache.gathered import PAGES_GATHERED
from attn_dispatch.core.rewrites.cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.cache.near_keys import NEAR_KEYS
from attn_dispatch.core.rewrites.cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.reason import rules_of
from attn_dispatch.semantics.merge import merged
from attn_dispatch.xla import paged as xla_paged
from attn_dispatch_tools.verify.cache_cases import CACHE
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from tests.support.backend import needs_cudnn
from tests.support.in_place_of_kernels import by_xla, kernel
from tests.support.rewritten_calls import rewritten_alone

B, N, K, H, V, PAGE, PAGES = 3, 4, 2, 16, 24, 8, 5
LENGTHS = np.array([33, 0, 40], np.int32)


def cache(dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, ...]:
    """key [B, S, K, H], value, and the same in pages with NaN where nobody may look."""
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((B, PAGE * PAGES, K, d)) for d in (H, V))
    table = rng.permutation(B * PAGES + 2)[: B * PAGES].reshape(B, PAGES).astype(np.int32)
    in_pages = []
    for x in (key, value):
        pages = np.full((B * PAGES + 2, PAGE, K, x.shape[-1]), np.nan)
        hidden = np.arange(PAGE * PAGES)[None, :, None, None] >= LENGTHS[:, None, None, None]
        pages[table] = np.where(hidden, np.nan, x).reshape(B, PAGES, PAGE, K, -1)
        in_pages.append(jnp.asarray(pages, dtype))
    table = np.where(np.arange(PAGES) * PAGE < LENGTHS[:, None], table, -999)
    return jnp.asarray(key, dtype), jnp.asarray(value, dtype), *in_pages, table.astype(np.int32)


def queries(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((*shape, N, H)), dtype)


def on_arrays(query: jax.Array, **options: Any) -> Any:
    key, value, *_ = cache()
    causal: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    return dot_product_attention(
        query, key, value, key_value_seq_lengths=LENGTHS, **causal | options
    )


def in_the_cache(query: jax.Array, **options: Any) -> Any:
    _, _, *pages = cache()
    return paged_attention(query, *pages, LENGTHS, **options)


@pytest.mark.parametrize("t", [1, 3, 9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"local_window_size": (5, 0)},
        {"logits_soft_cap": 2.0},
        {"sinks": np.linspace(-1, 1, N, dtype=np.float32)},
        {"alibi_slopes": np.linspace(0.1, 1, N, dtype=np.float32)},
        {"scale": 0.3},
        {"query_seq_lengths": np.array([1, 0, 1])},
        {"score_mod": lambda score, b, n, t, s: score + jnp.sin(b + 2.0 * n + t - s)},
    ],
    ids=lambda x: ", ".join(x) or "plain",
)
def test_it_is_the_call_on_arrays(t, options):
    query = queries(B, t)
    for found, expected in zip(
        in_the_cache(query, return_lse=True, **options),
        on_arrays(query, return_lse=True, **options),
        strict=True,
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_rows_a_few_at_a_time(monkeypatch):
    expected = in_the_cache(queries(B, 2), return_lse=True)
    monkeypatch.setattr(xla_paged, "GATHERED_BYTES", 1)
    jax.clear_caches()
    text = jax.jit(in_the_cache).lower(queries(B, 2)).as_text()
    assert "while" in text
    found = in_the_cache(queries(B, 2), return_lse=True, sinks=None)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    jax.clear_caches()


def test_prompts_beside_decoding():
    """Ragged queries: one of the first sequence, none of the second, three of the third."""
    cu, tokens = np.array([0, 1, 1, 4]), queries(6)
    found, lse = in_the_cache(tokens, cu_seqlens_q=cu, max_seqlen_q=3, return_lse=True)
    for longest in (None, 3, 40):  # a step in which nobody asks anything
        nothing = in_the_cache(tokens[:0], cu_seqlens_q=0 * cu, max_seqlen_q=longest)
        assert nothing.shape == (0, *found.shape[1:])
    padded = jnp.zeros((B, 3, N, H)).at[0, 0].set(tokens[0]).at[2].set(tokens[1:4])
    expected, expected_lse = in_the_cache(
        padded, query_seq_lengths=np.array([1, 0, 3]), return_lse=True
    )
    np.testing.assert_allclose(found[0], expected[0, 0], atol=1e-6)
    np.testing.assert_allclose(found[1:4], expected[2], atol=1e-6)
    np.testing.assert_allclose(lse[1:4], expected_lse[2], atol=1e-6)
    assert (found[4:] == 0).all() and (lse[4:] == -np.inf).all()
    in_jit = jax.jit(lambda x, cu: in_the_cache(x, cu_seqlens_q=cu))(tokens, cu)
    np.testing.assert_allclose(in_jit, found, atol=1e-6)


@pytest.mark.parametrize("cu", [(0, 2, 1, 4), (1, 1, 2, 3), (0, 1, 2, 7), (-1, 1, 2, 3)])
def test_wrong_cu_seqlens_that_are_traced_make_nan(cu):
    call = jax.jit(lambda x, cu: in_the_cache(x, cu_seqlens_q=cu))
    assert np.isnan(call(queries(6), np.array(cu))).all()


def test_a_traced_sequence_that_is_too_long_is_nan_itself():
    call = jax.jit(lambda x, cu: in_the_cache(x, cu_seqlens_q=cu, max_seqlen_q=2))
    found = np.asarray(call(queries(6), np.array([0, 1, 1, 4])))
    assert np.isnan(found[1:4]).all() and not np.isnan(found[0]).any() and (found[4:] == 0).all()


@pytest.mark.parametrize(("length", "page"), [(41, None), (-1, None), (33, 17), (33, -1)])
def test_what_is_wrong_in_traced_values_is_nan_in_its_own_row(length, page):
    _, _, key, value, table = cache()
    table[0, 4] = table[0, 4] if page is None else page
    call = jax.jit(paged_attention)
    found = np.asarray(call(queries(B, 2), key, value, table, np.array([length, 0, 40], np.int32)))
    assert np.isnan(found[0]).all() and not np.isnan(found[1:]).any()


def windowed(t: int, missing: dict[int, int], window: Any, **options: Any) -> Any:
    """A traced call without the first `missing[row]` pages of rows, and one that has all of them;
    what pages hold that no query reaches is NaN."""
    _, _, key, value, table = cache()
    without = table.copy()
    for row, number in missing.items():
        key, value = (x.at[table[row, :number]].set(jnp.nan) for x in (key, value))
        without[row, :number] = -1
    # Page 0 is nobody's, and NaN: entries that are not there must not stand for it.
    key, value = (
        jnp.pad(x, ((1, 0), *[(0, 0)] * 3), constant_values=jnp.nan) for x in (key, value)
    )
    table = np.where(without < 0, -1, without + 1)
    call = jax.jit(partial(paged_attention, **options), static_argnames="local_window_size")
    found = call(queries(B, t), key, value, table, LENGTHS, local_window_size=window)
    expected = in_the_cache(queries(B, t), local_window_size=window, **options)
    return jax.tree.map(np.asarray, (found, expected))


@pytest.mark.parametrize("t", [1, 2, 9])
@pytest.mark.parametrize("left", [0, 5, 8, 30])
def test_pages_behind_a_window_need_not_be_there(t, left):
    """As many as no query reaches; with one fewer the row is NaN, and no other is."""
    most = {row: max(int(LENGTHS[row]) - t - left, 0) // PAGE for row in (0, 2)}
    found, expected = windowed(t, most, (left, 0))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    found, expected = windowed(t, {0: most[0] + 1, 2: most[2]}, (left, None))
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], expected[1:], atol=2e-6)


def test_pages_behind_a_window_and_everything_else():
    """Rows of fewer queries, pools that are mapped, gathered a few rows at a time, traced windows,
    and what is looked at before the call."""
    number = np.array([1, 0, 3], np.int32)
    found, expected = windowed(4, {0: 3, 2: 3}, (8, 0), query_seq_lengths=number, return_lse=True)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), found, expected)
    key, value, table = (np.array(x) for x in cache()[2:])
    table[0, :3] = 99
    given = (queries(B, 4), key, value)
    with pytest.raises(ValueError, match="key_value_seq_lengths and the window reach, got 99"):
        paged_attention(*given, table, LENGTHS, local_window_size=(8, 0))
    out = paged_attention(
        *given, table, LENGTHS, local_window_size=(8, 0), query_seq_lengths=number
    )
    np.testing.assert_allclose(out, in_the_cache(queries(B, 4), local_window_size=(8, 0),
                               query_seq_lengths=number), atol=2e-6)  # fmt: skip

    @jax.jit
    def traced(left, table):
        return paged_attention(*given, table, LENGTHS, local_window_size=(left, 0))

    assert np.isnan(traced(8, table)[0]).all() and not np.isnan(traced(4, table)).any()
    mapped = jax.vmap(
        lambda k, t: paged_attention(given[0], k, value, t, LENGTHS, local_window_size=(4, 0))
    )
    two = mapped(np.stack([key, key]), np.stack([table, table]))
    np.testing.assert_allclose(two[1], traced(4, table), atol=2e-6)


@pytest.mark.parametrize("rewrite", [NEAR_KEYS, PAGES_GATHERED], ids=lambda x: x.name)
@pytest.mark.parametrize("t", [1, 2])
def test_rewrites_without_the_pages_behind_a_window(rewrite, t):
    """Row 0 lacks one that it needs; row 2 lacks those that it does not. Page 0 is NaN."""
    _, _, key, value, table = cache()
    table += 1
    table[0, :4], table[2, :4] = -1, 99
    number = np.array([t, 0, 1], np.int32)
    arrays: dict[str, Any] = {
        "query": queries(B, t),
        "key_pages": key,
        "value_pages": value,
        "page_table": table,
    }
    arrays |= {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": number}
    operands = {x: jnp.asarray(y) for x, y in arrays.items()}
    for name in ("key_pages", "value_pages"):
        operands[name] = jnp.pad(operands[name], ((1, 0), *[(0, 0)] * 3), constant_values=jnp.nan)
    window: dict[str, Any] = {"local_window_size": (7, 0)}
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    spec = inspection.spec_of(**given, **window)
    operands |= {x: operands[x][None] for x in ("key_pages", "value_pages")}  # of one pool
    found = rewrite.compute(spec, rewrite.inner(spec), operands, Calls(by_xla, by_xla, by_xla))[
        "out"
    ]
    expected = in_the_cache(queries(B, t), query_seq_lengths=number, **window)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], expected[1:], atol=2e-6)


@pytest.mark.parametrize("missing", ["slots", "queries", "columns", "page", "values", "dims"])
def test_axes_without_length(missing):
    """Out has what of its shape there is, and is 0; a head dim of 0 leaves the mean of values."""
    b, t, m, page = (0 if missing == x else 2 for x in ("slots", "queries", "columns", "page"))
    h, v = (0 if x in missing else 8 for x in ("dims", "values"))
    table, lengths = np.zeros((b, m), np.int64), np.full(b, min(2, m * page))
    out, lse = paged_attention(
        jnp.ones((b, t, 4, h)), jnp.ones((3, page, 2, h)), jnp.ones((3, page, 2, v)), table,
        lengths, return_lse=True,
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((b, t, 4, v), (b, t, 4))
    if missing in ("columns", "page"):
        assert (out == 0).all() and (lse == -np.inf).all()
    if missing == "dims":
        np.testing.assert_allclose(out, 1)


def test_pages_that_are_shared():
    key, value, pages, value_pages, table = cache()
    table[1], lengths = table[2], np.array([33, 12, 40], np.int32)
    found = paged_attention(queries(B, 2), pages, value_pages, table, lengths)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    expected = dot_product_attention(
        queries(B, 2), key[jnp.array([0, 2, 2])], value[jnp.array([0, 2, 2])],
        key_value_seq_lengths=lengths, **options,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_the_table_is_cut_to_max_seqlen_kv():
    _, _, *pages = cache()
    lengths = np.array([9, 0, 16], np.int32)
    found = paged_attention(queries(B, 1), *pages, lengths, max_seqlen_kv=13)
    whole = paged_attention(queries(B, 1), *pages, lengths)
    np.testing.assert_allclose(found, whole, atol=1e-6)
    with pytest.raises(ValueError, match="key_value_seq_lengths: expected lengths from 0 to 16"):
        paged_attention(queries(B, 1), *pages, LENGTHS, max_seqlen_kv=13)


def test_vmap_over_queries_tables_and_pools():
    _, _, key, value, table = cache()
    query = queries(B, 2)
    expected = paged_attention(query, key, value, table, LENGTHS)

    def one(q, table, length):
        return paged_attention(q[None], key, value, table[None], length[None])[0]

    np.testing.assert_allclose(jax.vmap(one)(query, table, LENGTHS), expected, atol=1e-6)
    two = jax.vmap(paged_attention, (None, 0, 0, None, None))
    pools = [jnp.stack([x, 2 * x]) for x in (key, value)]
    found = two(query, *pools, table, LENGTHS)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    expected = paged_attention(query, *(x[1] for x in pools), table, LENGTHS)
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    for of_keys, of_values in ((0, None), (None, 0)):
        one_of_two = jax.vmap(paged_attention, (None, of_keys, of_values, None, None))
        given = [x if y is None else jnp.stack([2 * x, x])
                 for x, y in ((key, of_keys), (value, of_values))]  # fmt: skip
        found = one_of_two(query, *given, table, LENGTHS)
        np.testing.assert_allclose(found[1], paged_attention(query, key, value, table, LENGTHS))
    thrice = jax.vmap(two, (0, None, None, 0, None))
    tables = np.stack([table] * 3)
    found = thrice(jnp.stack([query] * 3), *pools, tables, LENGTHS)
    np.testing.assert_allclose(found[2, 1], expected, atol=1e-6)


def test_there_are_no_gradients():
    with pytest.raises(NotImplementedError, match="paged_attention has no gradients"):
        jax.grad(lambda q: in_the_cache(q).sum())(queries(B, 1))
    _, _, key, value, table = cache()
    with pytest.raises(NotImplementedError, match="paged_attention has no gradients"):
        jax.grad(lambda k: paged_attention(queries(B, 1), k, value, table, LENGTHS).sum())(key)
    constant = jax.grad(lambda q: in_the_cache(jax.lax.stop_gradient(q)).sum() + q.sum())
    assert (constant(queries(B, 1)) == 1).all()


_WRONG = {
    "query": (queries(B), r"query: expected \[B, T, N, H\], got \[3, 4, 16\]"),
    "key_pages": (np.zeros((9, 8, 2, 8), np.float32), "key_pages: expected query's head dim 16"),
    "value_pages": (
        np.zeros((9, 8, 2, 8), np.float32),
        r"value_pages: expected key_pages' number of pages, page size and heads \[17, 8, 2\]",
    ),
    "page_table": (np.zeros((3, 5)), "page_table: expected integers, got float"),
    "key_value_seq_lengths": (None, "key_value_seq_lengths: expected an array of integers"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_arrays_say_what_was_expected(name):
    _, _, key, value, table = cache()
    given: dict[str, Any] = {
        "query": queries(B, 1),
        "key_pages": key,
        "value_pages": value,
        "page_table": table,
    }
    given |= {"key_value_seq_lengths": LENGTHS}
    wrong, message = _WRONG[name]
    with pytest.raises(ValueError, match=message):
        paged_attention(**given | {name: wrong})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": np.zeros((2, 5), np.int32)}, r"page_table: expected \[B, pages"),
        ({"page_table": np.zeros((15,), np.int32)}, r"page_table: expected \[B, pages"),
        ({"page_table": np.full((3, 5), 17, np.int32)}, "page_table: expected pages from 0 to 16"),
        ({"key_value_seq_lengths": np.array([41, 0, 0])}, "expected lengths from 0 to 40, got 41"),
        ({"key_value_seq_lengths": np.zeros(3)}, "expected an integer dtype"),
        ({"max_seqlen_kv": 41}, "max_seqlen_kv: expected at most 40"),
        ({"max_seqlen_kv": 0}, "max_seqlen_kv: expected"),
        ({"max_seqlen_q": 4}, "cu_seqlens_q: expected one with max_seqlen_q=4, got None"),
        ({"cu_seqlens_q": np.array([0, 1, 2, 3])}, r"query: expected \[tokens, N, H\]"),
        ({"query": queries(4), "cu_seqlens_q": np.array([0, 4])}, "q: expected integers"),
        ({"query": queries(4), "cu_seqlens_q": np.array([0, 1, 2, 5])}, "values up to 4, got 5"),
        (
            {"query": queries(4), "cu_seqlens_q": np.array([0, 1, 2, 3]),
             "query_seq_lengths": np.array([1, 1, 1])},
            "query_seq_lengths: expected None beside cu_seqlens_q",
        ),
        ({"query": np.zeros((3, 1, 3, 16), np.float32)}, "key_pages's 2, got 3 .pages are"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_calls_say_what_was_expected(changes, message):
    _, _, key, value, table = cache()
    given = {"query": queries(B, 1), "key_pages": key, "value_pages": value, "page_table": table}
    with pytest.raises(ValueError, match=message):
        paged_attention(**given | {"key_value_seq_lengths": LENGTHS} | changes)


def test_explain_says_what_stands_in_the_way():
    arrays = {
        "key_pages": jax.ShapeDtypeStruct((40, 24, K, H), jnp.bfloat16),
        "value_pages": jax.ShapeDtypeStruct((40, 24, K, V), jnp.bfloat16),
        "page_table": jax.ShapeDtypeStruct((B, PAGES), jnp.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
    }
    query = jax.ShapeDtypeStruct((B, 1, N, H), jnp.bfloat16)
    found = explain(query, **arrays)
    assert (found.chosen_forward, found.backward) == ("xla", ())
    assert "pages gathered" in str(found) and "backward  " not in str(found)
    on_amd = {x.implementation: x for x in explain(query, **arrays, target="gfx942").forward}
    assert "aiter/page_size" in rules_of(on_amd["aiter"].reasons_as_it_is)


@needs_cudnn
def test_how_cudnn_takes_them():
    def forward(t: int, page: int = 16, **options: Any) -> Any:
        arrays = {
            "key_pages": jax.ShapeDtypeStruct((40, page, K, 64), jnp.bfloat16),
            "value_pages": jax.ShapeDtypeStruct((40, page, K, 64), jnp.bfloat16),
            "page_table": jax.ShapeDtypeStruct((B, 64), jnp.int32),
            "key_value_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        }
        query = jax.ShapeDtypeStruct((B, t, N, 64), jnp.bfloat16)
        return explain(query, **arrays, target="sm90", **options).forward[0]

    assert forward(1).rewrites == ()
    assert forward(4).rewrites == (QUERIES_AS_HEADS.name,)
    assert forward(33).rewrites == (WHOLE_PAGES.name, HEADS_AS_QUERIES.name)
    assert forward(1, local_window_size=(50, 0)).rewrites == (NEAR_KEYS.name,)
    odd = forward(1, page=24)
    assert odd.rewrites == (SMALLER_PAGES.name,)
    assert forward(1, page=3).rewrites == (PAGES_GATHERED.name,)
    assert "cudnn/page_size" in rules_of(odd.reasons_as_it_is)


@needs_cudnn
def test_a_cache_that_is_no_pages_is_not_copied():
    """One custom call that is given the arrays as they are."""
    shapes = ((B, 1, N, 64), (B, 512, K, 64), (B, 512, K, 64))
    given = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]

    def call(q, k, v, lengths):
        return dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, is_causal=True, causal_alignment="bottom_right"
        )

    with attn_dispatch.target("sm90"):
        traced = jax.jit(call).trace(*given, jax.ShapeDtypeStruct((B,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (x for x in text.splitlines() if "custom_call @attn_dispatch" in x)
    assert len(re.findall(r"tensor<3x512x2x64xbf16>", line)) == 2
    assert "packed_rows_q = 0" in line and "window_right = -1" in line


def some_that_apply(rewrite: Any, most: int) -> list[Case]:
    def applies(case: Case) -> bool:
        if case.transform in ("vmap", "scan") or case.s > 1024 or case.score_shift:
            return False
        operands = case.avals()
        options = case.forward_options()
        if case.page:
            options = paged_options(case, options)
            operands = jax.eval_shape(partial(in_pages, case), operands)
        return rewrite.applied(spec_of(options, operands)) is not None

    cases = [case for case in CACHE if applies(case)]
    return cases[:: -(-len(cases) // most)]


@pytest.mark.parametrize(
    "rewrite",
    [QUERIES_AS_HEADS, NEAR_KEYS, WHOLE_PAGES, SMALLER_PAGES, PAGES_GATHERED],
    ids=lambda x: x.name,
)
def test_rewrites_change_nothing(rewrite):
    """By XLA, and few queries by what stands for cuDNN's kernel, which reads no padding.

    Of the cases that a rewrite is for every so many, from the first to the last of the table. Each
    has shapes of its own, for which all is compiled anew.
    """
    found = 0
    for number, case in enumerate(some_that_apply(rewrite, 10)):
        is_heads_first = number % 3 == 1 and case.page.bit_count() < 2  # others are not cut
        case = replace(
            case,
            heads_first="kv" if is_heads_first else "",
            one_pool=case.page > 0 and number % 2 == 1,
        )
        computes = [by_xla]
        if rewrite is QUERIES_AS_HEADS and case.h == 64 and case.n == 8:
            computes.append(kernel)
        for compute in computes:
            results = rewritten_alone(rewrite, case, compute)
            if results is None:
                continue
            found += 1
            for name, x in results[0].items():
                x, y = (np.asarray(z, np.float32) for z in (x, results[1][name]))
                assert (np.isnan(x) == np.isnan(y)).all(), (case, name)
                assert ((x == -np.inf) == (y == -np.inf)).all(), (case, name)
                np.testing.assert_allclose(x, y, atol=0.02, rtol=0.01, err_msg=case.name)
    assert found >= 6


def test_what_two_sets_of_keys_make_together():
    key, value, *_ = cache()
    query, halves = queries(B, 4), (slice(0, 17), slice(17, 40))
    parts = [dot_product_attention(query, key[:, x], value[:, x], return_lse=True) for x in halves]
    expected = dot_product_attention(query, key, value, return_lse=True)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        merged(*parts[0], *parts[1]), expected,
    )  # fmt: skip
    nothing = jnp.full_like(parts[0][0], jnp.nan), jnp.full_like(parts[0][1], -jnp.inf)
    for pair in ((*parts[0], *nothing), (*nothing, *parts[0])):
        np.testing.assert_allclose(merged(*pair)[0], parts[0][0], atol=1e-6)
    out, lse = merged(*nothing, *nothing)
    assert (out == 0).all() and (lse == -np.inf).all()


_ON_A_MESH = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_dispatch import paged_attention
from tests.test_paged import B, LENGTHS, cache, in_the_cache, queries
kind = AxisType[sys.argv[1]]
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
_, _, key, value, table = cache()
take = np.array([0, 2])
expected = in_the_cache(queries(B, 2))[take]
of_heads = P(None, None, "model")
specs = (P("data", None, "model"), of_heads, of_heads, P("data"), P("data"))
given = (queries(B, 2)[take], key, value, table[take], LENGTHS[take])
with jax.set_mesh(mesh):
    placed = [jax.device_put(x, NamedSharding(mesh, y)) for x, y in zip(given, specs)]
    call = jax.jit(paged_attention)
    found, text = call(*placed), call.lower(*placed).compile().as_text()
np.testing.assert_allclose(found, expected, atol=2e-6)
assert tuple(found.sharding.spec)[:3] == tuple(specs[0]), found.sharding
assert not any(x in text for x in ("all-gather", "all-reduce", "all-to-all")), text
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh_kv_heads_and_rows_are_split(kind):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    subprocess.run(
        (sys.executable, "-c", _ON_A_MESH, kind),
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )


def test_the_spec_counts_keys_by_pages():
    case = next(x for x in CACHE if x.page == 16)
    options = case.forward_options()
    operands = {name: jnp.asarray(x) for name, x in case.operands().items()}
    spec = spec_of(paged_options(case, options), in_pages(case, operands))
    assert isinstance(spec, AttentionSpec) and spec.is_paged and not spec.is_empty
    assert (spec.seq_len_kv, spec.page_size) == (case.s, 16)
    assert (spec.num_kv_heads, spec.head_dim_v) == (case.k, case.v)
