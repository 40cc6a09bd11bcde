"""Rewrites of calls on pages leave results unchanged; which of them cuDNN's calls use."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, explain, inspection
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.near_keys import NEAR_KEYS
from attn_dispatch.core.rewrites.kv_cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.reason import rules_of
from attn_dispatch.semantics.merge import merged
from attn_dispatch_tools.verify.cache_cases import CACHE
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from tests.support.backend import needs_cudnn
from tests.support.extent import EVERY_SIZE
from tests.support.kernel_stand_ins import by_xla, kernel
from tests.support.paged_calls import (
    LENGTHS,
    B,
    K,
    N,
    attend_in_pages,
    cache,
    queries,
)
from tests.support.rewritten_calls import rewrite_results


@pytest.mark.parametrize("rewrite", [NEAR_KEYS, PAGES_GATHERED], ids=lambda x: x.name)
@pytest.mark.parametrize("t", [1, 2])
def test_pages_behind_a_window_may_be_missing(rewrite, t):
    """Row 0 lacks a page that it needs; row 2 lacks only pages behind the window. Page 0 is NaN."""
    _, _, key, value, table = cache()
    table += 1
    table[0, :4], table[2, :4] = -1, 99
    number = np.array([t, 0, 1], np.int32)
    arrays = {"query": queries(B, t), "key_pages": key, "value_pages": value, "page_table": table}
    arrays |= {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": number}
    operands = {x: jnp.asarray(y) for x, y in arrays.items()}
    for name in ("key_pages", "value_pages"):
        operands[name] = jnp.pad(operands[name], ((1, 0), *[(0, 0)] * 3), constant_values=jnp.nan)
    window: dict[str, Any] = {"local_window_size": (7, 0)}
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    spec = inspection.spec_of(**given, **window)
    operands |= {x: operands[x][None] for x in ("key_pages", "value_pages")}  # as one pool
    inner = rewrite.inner(spec)
    calls = Calls(partial(by_xla, inner), by_xla, by_xla)
    found = rewrite.compute(spec, inner, operands, calls)["out"]
    expected = attend_in_pages(queries(B, t), query_seq_lengths=number, **window)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], expected[1:], atol=2e-6)


@needs_cudnn
def test_rewrites_that_cudnn_uses_for_pages():
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
def test_cache_in_arrays_is_not_copied():
    """One custom call receives the arrays unchanged."""
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


def sample_of_cases(rewrite: Any, limit: int) -> list[Case]:
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
    return cases[:: -(-len(cases) // limit)]


@pytest.mark.parametrize(
    "rewrite",
    [QUERIES_AS_HEADS, NEAR_KEYS, WHOLE_PAGES, SMALLER_PAGES, PAGES_GATHERED],
    ids=lambda x: x.name,
)
def test_rewrites_leave_results_unchanged(rewrite):
    """By XLA, and for few queries also by NumPy as cuDNN's kernel, which reads no padding.

    A sample of the cases to which a rewrite applies, spread over the table: every case has other
    shapes, for which everything is compiled again.
    """
    found = 0
    for number, case in enumerate(sample_of_cases(rewrite, 1000 if EVERY_SIZE else 7)):
        is_heads_first = number % 3 == 1 and case.page.bit_count() < 2  # other pages are not cut
        case = replace(
            case,
            heads_first="kv" if is_heads_first else "",
            one_pool=case.page > 0 and number % 2 == 1,
        )
        computes = [by_xla]
        if rewrite is QUERIES_AS_HEADS and case.h == 64 and case.n == 8:
            computes.append(kernel)
        for compute in computes:
            results = rewrite_results(rewrite, case, compute, is_compiled=True)
            if results is None:
                continue
            found += 1
            for name, x in results[0].items():
                x, y = (np.asarray(z, np.float32) for z in (x, results[1][name]))
                assert (np.isnan(x) == np.isnan(y)).all(), (case, name)
                assert ((x == -np.inf) == (y == -np.inf)).all(), (case, name)
                np.testing.assert_allclose(x, y, atol=0.02, rtol=0.01, err_msg=case.name)
    assert found >= 6


def test_merging_two_sets_of_keys_gives_the_whole_result():
    key, value, *_ = cache()
    query, halves = queries(B, 4), (slice(0, 17), slice(17, 40))
    parts = [dot_product_attention(query, key[:, x], value[:, x], return_lse=True) for x in halves]
    expected = dot_product_attention(query, key, value, return_lse=True)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        merged(*parts[0], *parts[1]), expected,
    )  # fmt: skip
    without_keys = jnp.full_like(parts[0][0], jnp.nan), jnp.full_like(parts[0][1], -jnp.inf)
    for pair in ((*parts[0], *without_keys), (*without_keys, *parts[0])):
        np.testing.assert_allclose(merged(*pair)[0], parts[0][0], atol=1e-6)
    out, lse = merged(*without_keys, *without_keys)
    assert (out == 0).all() and (lse == -np.inf).all()
