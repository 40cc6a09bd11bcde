"""`paged_attention`: its results, the calls that it refuses, and its lowering."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, paged_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import rules_of
from attn_dispatch.xla import paged as xla_paged
from attn_dispatch_tools.verify.cache_cases import CACHE
from attn_dispatch_tools.verify.case import spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from tests.support.paged_calls import (
    LENGTHS,
    PAGE,
    PAGES,
    B,
    H,
    K,
    N,
    V,
    attend_in_pages,
    cache,
    queries,
)


def on_arrays(query: jax.Array, **options: Any) -> Any:
    key, value, *_ = cache()
    causal: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    return dot_product_attention(
        query, key, value, key_value_seq_lengths=LENGTHS, **causal | options
    )


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
def test_paged_attention_equals_the_call_on_arrays(t, options):
    query = queries(B, t)
    for found, expected in zip(
        attend_in_pages(query, return_lse=True, **options),
        on_arrays(query, return_lse=True, **options),
        strict=True,
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_gathering_a_few_rows_at_a_time_gives_the_same_result(monkeypatch):
    expected = attend_in_pages(queries(B, 2), return_lse=True)
    monkeypatch.setattr(xla_paged, "GATHERED_BYTES", 1)
    jax.clear_caches()
    text = jax.jit(attend_in_pages).lower(queries(B, 2)).as_text()
    assert "while" in text
    found = attend_in_pages(queries(B, 2), return_lse=True, sinks=None)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    jax.clear_caches()


def test_ragged_queries_equal_padded_ones():
    """The first sequence has one query, the second none, and the third three."""
    cu, tokens = np.array([0, 1, 1, 4]), queries(6)
    found, lse = attend_in_pages(tokens, cu_seqlens_q=cu, max_seqlen_q=3, return_lse=True)
    for longest in (None, 3, 40):  # a step without queries
        nothing = attend_in_pages(tokens[:0], cu_seqlens_q=0 * cu, max_seqlen_q=longest)
        assert nothing.shape == (0, *found.shape[1:])
    padded = jnp.zeros((B, 3, N, H)).at[0, 0].set(tokens[0]).at[2].set(tokens[1:4])
    expected, expected_lse = attend_in_pages(
        padded, query_seq_lengths=np.array([1, 0, 3]), return_lse=True
    )
    np.testing.assert_allclose(found[0], expected[0, 0], atol=1e-6)
    np.testing.assert_allclose(found[1:4], expected[2], atol=1e-6)
    np.testing.assert_allclose(lse[1:4], expected_lse[2], atol=1e-6)
    assert (found[4:] == 0).all() and (lse[4:] == -np.inf).all()
    in_jit = jax.jit(lambda x, cu: attend_in_pages(x, cu_seqlens_q=cu))(tokens, cu)
    np.testing.assert_allclose(in_jit, found, atol=1e-6)


@pytest.mark.parametrize("cu", [(0, 2, 1, 4), (1, 1, 2, 3), (0, 1, 2, 7), (-1, 1, 2, 3)])
def test_wrong_traced_cu_seqlens_make_every_row_nan(cu):
    call = jax.jit(lambda x, cu: attend_in_pages(x, cu_seqlens_q=cu))
    assert np.isnan(call(queries(6), np.array(cu))).all()


def test_a_traced_sequence_that_is_too_long_alone_is_nan():
    call = jax.jit(lambda x, cu: attend_in_pages(x, cu_seqlens_q=cu, max_seqlen_q=2))
    found = np.asarray(call(queries(6), np.array([0, 1, 1, 4])))
    assert np.isnan(found[1:4]).all() and not np.isnan(found[0]).any() and (found[4:] == 0).all()


@pytest.mark.parametrize(("length", "page"), [(41, None), (-1, None), (33, 17), (33, -1)])
def test_a_wrong_traced_length_or_page_makes_only_its_row_nan(length, page):
    _, _, key, value, table = cache()
    table[0, 4] = table[0, 4] if page is None else page
    call = jax.jit(paged_attention)
    found = np.asarray(call(queries(B, 2), key, value, table, np.array([length, 0, 40], np.int32)))
    assert np.isnan(found[0]).all() and not np.isnan(found[1:]).any()


def windowed(t: int, missing: dict[int, int], window: Any, **options: Any) -> Any:
    """A traced call without the first `missing[row]` pages of rows, and the call with all pages.

    Keys and values that no query reaches are NaN.
    """
    _, _, key, value, table = cache()
    without = table.copy()
    for row, number in missing.items():
        key, value = (x.at[table[row, :number]].set(jnp.nan) for x in (key, value))
        without[row, :number] = -1
    # Page 0 belongs to no row and is NaN: missing entries must not be read as page 0.
    key, value = (
        jnp.pad(x, ((1, 0), *[(0, 0)] * 3), constant_values=jnp.nan) for x in (key, value)
    )
    table = np.where(without < 0, -1, without + 1)
    call = jax.jit(partial(paged_attention, **options), static_argnames="local_window_size")
    found = call(queries(B, t), key, value, table, LENGTHS, local_window_size=window)
    expected = attend_in_pages(queries(B, t), local_window_size=window, **options)
    return jax.tree.map(np.asarray, (found, expected))


@pytest.mark.parametrize("t", [1, 2, 9])
@pytest.mark.parametrize("left", [0, 5, 8, 30])
def test_pages_before_the_window_may_be_missing(t, left):
    """All pages that no query reaches may be missing; with one more missing, that row is NaN."""
    unreached = {row: max(int(LENGTHS[row]) - t - left, 0) // PAGE for row in (0, 2)}
    found, expected = windowed(t, unreached, (left, 0))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    found, expected = windowed(t, {0: unreached[0] + 1, 2: unreached[2]}, (left, None))
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], expected[1:], atol=2e-6)


def test_pages_before_the_window_may_be_missing_with_other_options():
    """Query lengths, checks before the call, traced windows and vmapped pools."""
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
    np.testing.assert_allclose(out, attend_in_pages(queries(B, 4), local_window_size=(8, 0),
                               query_seq_lengths=number), atol=2e-6)  # fmt: skip

    @jax.jit
    def traced(left, table):
        return paged_attention(*given, table, LENGTHS, local_window_size=(left, 0))

    assert np.isnan(traced(8, table)[0]).all() and not np.isnan(traced(4, table)).any()
    mapped = jax.vmap(
        lambda k, t: paged_attention(given[0], k, value, t, LENGTHS, local_window_size=(4, 0))
    )
    over_pools = mapped(np.stack([key, key]), np.stack([table, table]))
    np.testing.assert_allclose(over_pools[1], traced(4, table), atol=2e-6)


@pytest.mark.parametrize("missing", ["slots", "queries", "columns", "page", "values", "dims"])
def test_empty_axes_give_zeros_or_empty_results(missing):
    """Without keys the result is 0; with a head dim of 0 it is the mean of the values."""
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


def test_rows_may_share_pages():
    key, value, pages, value_pages, table = cache()
    table[1], lengths = table[2], np.array([33, 12, 40], np.int32)
    found = paged_attention(queries(B, 2), pages, value_pages, table, lengths)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    expected = dot_product_attention(
        queries(B, 2), key[jnp.array([0, 2, 2])], value[jnp.array([0, 2, 2])],
        key_value_seq_lengths=lengths, **options,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_max_seqlen_kv_cuts_the_page_table():
    _, _, *pages = cache()
    lengths = np.array([9, 0, 16], np.int32)
    found = paged_attention(queries(B, 1), *pages, lengths, max_seqlen_kv=13)
    whole = paged_attention(queries(B, 1), *pages, lengths)
    np.testing.assert_allclose(found, whole, atol=1e-6)


def test_vmap_over_queries_tables_and_pools_equals_single_calls():
    _, _, key, value, table = cache()
    query = queries(B, 2)
    expected = paged_attention(query, key, value, table, LENGTHS)

    def attend_row(q, table, length):
        return paged_attention(q[None], key, value, table[None], length[None])[0]

    np.testing.assert_allclose(jax.vmap(attend_row)(query, table, LENGTHS), expected, atol=1e-6)
    over_pools = jax.vmap(paged_attention, (None, 0, 0, None, None))
    pools = [jnp.stack([x, 2 * x]) for x in (key, value)]
    found = over_pools(query, *pools, table, LENGTHS)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    expected = paged_attention(query, *(x[1] for x in pools), table, LENGTHS)
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    for key_axis, value_axis in ((0, None), (None, 0)):
        over_one_pool = jax.vmap(paged_attention, (None, key_axis, value_axis, None, None))
        given = [x if y is None else jnp.stack([2 * x, x])
                 for x, y in ((key, key_axis), (value, value_axis))]  # fmt: skip
        found = over_one_pool(query, *given, table, LENGTHS)
        np.testing.assert_allclose(found[1], paged_attention(query, key, value, table, LENGTHS))
    over_tables = jax.vmap(over_pools, (0, None, None, 0, None))
    tables = np.stack([table] * 3)
    found = over_tables(jnp.stack([query] * 3), *pools, tables, LENGTHS)
    np.testing.assert_allclose(found[2, 1], expected, atol=1e-6)


def test_gradients_past_a_stopped_gradient_are_computed():
    constant = jax.grad(lambda q: attend_in_pages(jax.lax.stop_gradient(q)).sum() + q.sum())
    assert (constant(queries(B, 1)) == 1).all()


def test_explain_gives_the_reason_against_small_pages():
    arrays = {
        "key_pages": jax.ShapeDtypeStruct((40, 24, K, H), jnp.bfloat16),
        "value_pages": jax.ShapeDtypeStruct((40, 24, K, V), jnp.bfloat16),
        "page_table": jax.ShapeDtypeStruct((B, PAGES), jnp.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
    }
    query = jax.ShapeDtypeStruct((B, 1, N, H), jnp.bfloat16)
    found = explain(query, **arrays)
    pools = [arrays[x] for x in ("key_pages", "value_pages")]
    others = {x: y for x, y in arrays.items() if x not in ("key_pages", "value_pages")}
    assert str(explain(query, *pools, **others)) == str(found)
    assert (found.chosen_forward, found.backward) == ("xla", ())
    assert "pages gathered" in str(found) and "backward  " not in str(found)
    on_amd = {x.implementation: x for x in explain(query, **arrays, target="gfx942").forward}
    assert "aiter/page_size" in rules_of(on_amd["aiter"].reasons_as_it_is)


_ON_A_MESH = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_dispatch import paged_attention
from tests.test_paged import B, LENGTHS, cache, attend_in_pages, queries
kind = AxisType[sys.argv[1]]
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
_, _, key, value, table = cache()
take = np.array([0, 2])
expected = attend_in_pages(queries(B, 2))[take]
over_heads = P(None, None, "model")
specs = (P("data", None, "model"), over_heads, over_heads, P("data"), P("data"))
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
def test_a_mesh_splits_rows_and_kv_heads_without_collectives(kind):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    subprocess.run(
        (sys.executable, "-c", _ON_A_MESH, kind),
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )


def test_the_spec_counts_the_keys_of_the_pages():
    case = next(x for x in CACHE if x.page == 16)
    options = case.forward_options()
    operands = {name: jnp.asarray(x) for name, x in case.operands().items()}
    spec = spec_of(paged_options(case, options), in_pages(case, operands))
    assert isinstance(spec, AttentionSpec) and spec.is_paged and not spec.is_empty
    assert (spec.seq_len_kv, spec.page_size) == (case.s, 16)
    assert (spec.num_kv_heads, spec.head_dim_v) == (case.k, case.v)
