"""Arrays in other memory layouts: what public calls compute and what kernels receive."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, dropout_mask, explain, paged_attention, serving
from attn_dispatch.core.rewrites.kv_cache.blocks import Blocks
from attn_dispatch.core.tuning.winners import described
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices.target import parse
from attn_dispatch.inspection import spec_of
from attn_dispatch_tools.written_calls.notation import arguments
from tests.support.backend import needs_cudnn
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.present import present

B, T, S, N, K, H, V = 2, 6, 9, 4, 2, 16, 24
P, PAGE, M = 12, 8, 5
LENGTHS = np.array([33, 7, 40], np.int32)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def swapped(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -3, -2)


QKV = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, V, seed=2)
BNTH = tuple(map(swapped, QKV))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"scale": np.linspace(0.1, 0.4, N, dtype=np.float32)},
        {"key_value_seq_lengths": np.array([3, 9]), "query_seq_lengths": np.array([6, 0])},
        {"sinks": np.linspace(-1, 1, N, dtype=np.float32), "bias": normal(1, N, 1, S)},
        {"mask": np.arange(S)[None, None, None] > np.arange(T)[:, None] - 4},
        {"return_max_logits": True, "return_residual": True},
        {"dropout_rate": 0.5, "dropout_key": jax.random.key(3)},
    ],
    ids=lambda x: ", ".join(x),
)
def test_bnth_call_equals_the_call_on_swapped_arrays(options):
    def grads(call: Any, arrays: Any) -> Any:
        (out, lse, *others), pull = jax.vjp(call, *arrays)
        return (out, lse, *others), pull((jnp.cos(out), jnp.sin(lse), *map(jnp.ones_like, others)))

    def call(*arrays: jax.Array, **layout: Any) -> Any:
        out, *rest = dot_product_attention(*arrays, return_lse=True, **options, **layout)
        lse = rest.pop(1 if options.get("return_residual") else 0)
        return out, lse, *rest

    results, cotangents = grads(lambda *x: call(*x, qkv_layout="BNTH"), BNTH)
    expected, gradients = grads(call, QKV)
    assert results[0].shape == (B, N, T, V) and results[1].shape == (B, N, T)
    np.testing.assert_allclose(results[0], swapped(expected[0]), atol=1e-6)
    for got, wanted in zip(results[1:], expected[1:], strict=True):
        np.testing.assert_allclose(got, jnp.swapaxes(wanted, 1, 2), atol=1e-6)
    for got, wanted, given in zip(cotangents, gradients, BNTH, strict=True):
        assert got.shape == given.shape
        np.testing.assert_allclose(got, swapped(wanted), atol=1e-5)


def test_bnth_with_other_leading_dims_and_vmap():
    rank_3 = [x[0] for x in BNTH]
    np.testing.assert_allclose(
        dot_product_attention(*rank_3, qkv_layout="BNTH"),
        swapped(dot_product_attention(*(x[0] for x in QKV))),
        atol=1e-6,
    )
    mapped = jax.vmap(lambda *x: dot_product_attention(*x, qkv_layout="BNTH"))(*BNTH)
    np.testing.assert_allclose(mapped, dot_product_attention(*BNTH, qkv_layout="BNTH"), atol=1e-6)
    rank_5 = [x[None] for x in BNTH]
    np.testing.assert_allclose(
        dot_product_attention(*rank_5, qkv_layout="BNTH")[0], mapped, atol=1e-6
    )


def test_dropout_mask_and_explain_accept_bnth():
    options: dict[str, Any] = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    np.testing.assert_array_equal(
        dropout_mask(*BNTH, **options, qkv_layout="BNTH"), dropout_mask(*QKV, **options)
    )
    assert "heads first in queries and keys" in str(explain(*BNTH, qkv_layout="BNTH"))
    assert "heads first" not in str(explain(*QKV))


def test_written_calls_accept_layout_names():
    q, k = f"f32[{B},{N},{T},{H}]", f"f32[{B},{K},{S},{H}]"
    spec = spec_of(**arguments(f"q={q} k={k} qkv_layout=BNTH"))
    assert spec.shape("query") == (B, T, N, H)
    assert (spec.meaning.heads_first_q, spec.meaning.heads_first_kv) == (True, True)
    assert described(spec)["heads_first_q"] is True
    pool = f"f32[{P},2,{K},{PAGE},{H}]"
    text = f"q=f32[3,1,{N},{H}] key_pages={pool} value_pages=null page_table=i32[3,{M}] "
    spec = spec_of(**arguments(text + "key_value_seq_lengths=i32[3] kv_layout=HND"))
    assert spec.shape("key_pages") == (1, 2 * P, PAGE, K, H)
    assert (spec.meaning.heads_first_kv, spec.meaning.value_page) == (True, 1)


def cache() -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Pages of keys and values [P, page, K, H] and their table; unused pages are NaN."""
    rng = np.random.default_rng(5)
    table = rng.permutation(P)[: P // 3 * 3].reshape(3, -1)
    table = np.concatenate([table, table[:, :1]], axis=1)
    table[0, 4] = table[2, 4] = 11  # a page of two sequences
    table = np.where(np.arange(M) * PAGE < LENGTHS[:, None], table, -999).astype(np.int32)
    pages = [normal(P, PAGE, K, H, seed=i) for i in (3, 4)]
    used = np.unique(table[table >= 0])
    hidden = ~np.isin(np.arange(P), used)[:, None, None, None]
    key_pages, value_pages = (jnp.where(hidden, jnp.nan, x) for x in pages)
    return key_pages, value_pages, table


def pages_in(layout: str, one_pool: bool) -> tuple[Any, ...]:
    """key_pages and value_pages in the layout; for one pool, the pool and None."""
    pages = cache()[:2]
    if layout == "HND":
        pages = [swapped(x) for x in pages]
    return (jnp.stack(pages, axis=1), None) if one_pool else tuple(pages)


@pytest.mark.parametrize("one_pool", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("options", [{}, {"local_window_size": (9, 0)}, {"max_seqlen_kv": 40}])
def test_every_page_layout_gives_the_same_result(options, t: int, layout: str, one_pool: bool):
    keys, values, table = cache()
    query = normal(3, t, N, H)
    options = {"return_lse": True, **options}
    expected = paged_attention(query, keys, values, table, LENGTHS, **options)
    pools = pages_in(layout, one_pool)
    got = paged_attention(query, *pools, table, LENGTHS, kv_layout=layout, **options)
    in_jit = jax.jit(lambda q, table, *x: paged_attention(
        q, *x, table, LENGTHS, kv_layout=layout, **options
    ))(query, table, *pools)  # fmt: skip
    for x, y, z in zip(got, expected, in_jit, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
        np.testing.assert_allclose(z, y, atol=2e-6)


@pytest.mark.parametrize("page", [-1, P, 2**30, 2**31 - 1, -(2**31)])
def test_page_number_outside_the_pool_makes_its_row_nan(page: int):
    table = cache()[2].copy()
    table[2, 1] = page
    call = jax.jit(lambda q, x, table: paged_attention(q, x, None, table, LENGTHS))
    pool = pages_in("NHD", one_pool=True)[0]
    found = np.asarray(call(normal(3, 1, N, H), pool, table))
    assert np.isnan(found[2]).all() and not np.isnan(found[:2]).any()
    with pytest.raises(ValueError, match=f"page_table: expected pages from 0 to {P - 1} .*{page}"):
        paged_attention(normal(3, 1, N, H), pool, None, table, LENGTHS)


@pytest.mark.parametrize("one_pool", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("ragged", [False, True])
def test_serving_write_keeps_the_page_layout(ragged: bool, layout: str, one_pool: bool):
    tables = serving.new_tables(slots=3, pages_per_slot=4, num_pages=P, page_size=PAGE)
    tables = serving.grow(tables, jnp.array([9, 0, 3]))
    new = [normal(3, 9, K, H, seed=i) for i in (6, 7)]
    tokens: dict[str, Any] = {"tokens": jnp.array([9, 0, 3])}
    separate = [serving.write(jnp.zeros((P, PAGE, K, H)), x, tables, **tokens) for x in new]
    assert all((x != 0).sum() == 12 * K * H for x in separate)
    if ragged:
        new = [jnp.concatenate([x[0], x[2, :3]]) for x in new]
        tokens: dict[str, Any] = {"cu_seqlens": jnp.array([0, 9, 9, 12])}
    page = (PAGE, K, H) if layout == "NHD" else (K, PAGE, H)
    if one_pool:
        pool = jnp.zeros((P, 2, *page))
        found = serving.write(pool, tuple(new), tables, kv_layout=layout, **tokens)
        written = [found[:, 0], found[:, 1]]
    else:
        written = [
            serving.write(jnp.zeros((P, *page)), x, tables, kv_layout=layout, **tokens) for x in new
        ]
    for x, y in zip(written, separate, strict=True):
        np.testing.assert_array_equal(x if layout == "NHD" else swapped(x), y)


# What kernels receive.

BF = jnp.bfloat16


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, BF)


def lowered(call: Any, *given: Any) -> str:
    with attn_dispatch.target("sm90"):
        return jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def transposed_twice(text: str, value: str) -> str:
    """The value that becomes `value` by two transpositions with the same axes."""
    for _ in range(2):
        found = re.search(
            rf"{re.escape(value)} = stablehlo.transpose (%\S+), dims = \[0, 2, 1, 3\]", text
        )
        assert found, value
        value = found[1]
    return value


@needs_cudnn
def test_cudnn_receives_arrays_in_the_callers_layout():
    """Each transposition is undone by another, with nothing between: XLA drops such pairs
    (benchmarks/layouts.py shows that on a GPU)."""
    shapes = (2, 8, 256, 64), (2, 4, 256, 64), (2, 4, 256, 64)

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, qkv_layout="BNTH")
        return out.astype(jnp.float32).sum()

    text = lowered(jax.grad(loss, (0, 1, 2)), *(struct(*x) for x in shapes))
    calls = [x for x in text.splitlines() if "custom_call @attn_dispatch_cudnn" in x]
    assert len(calls) == 2
    for line in calls:
        operands = re.search(r"custom_call @\w+\((.*?)\)", line)
        assert operands and "head_rows_q = 256" in line and "head_rows_kv = 256" in line
        given = operands[1].split(", ")[:3]
        for name, argument in zip(given, ("%arg0", "%arg1", "%arg2"), strict=True):
            assert transposed_twice(text, name) == argument
    assert re.search(r"-> \(tensor<2x8x256x64xbf16>, tensor<2x4x256x64xbf16>, tensor<2x4", calls[1])


@needs_cudnn
@pytest.mark.parametrize("t", [1, 4, 40])
@pytest.mark.parametrize("one_pool", [False, True])
def test_cudnn_receives_whole_pools_unchanged(one_pool: bool, t: int):
    sizes = (P, *((2,) if one_pool else ()), K, 64, 64)

    def call(q, table, lengths, *pools):
        keys, values = pools if len(pools) == 2 else (*pools, None)
        return paged_attention(q, keys, values, table, lengths, kv_layout="HND")

    ints = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((3, M), (3,))]
    pools = [struct(*sizes)] * (1 if one_pool else 2)
    text = lowered(call, struct(3, t, N, 64), *ints, *pools)
    (line,) = (x for x in text.splitlines() if f"num_pages = {P * (1 + one_pool)} " in x)
    assert len(re.findall(rf"tensor<{P * (1 + one_pool)}x{K}x64x64xbf16>", line)) == 2
    assert "head_rows_kv = 64" in line
    assert f"has_value_table = {str(one_pool).lower()}" in line
    tables = len(re.findall(r"tensor<\d+x\d+xi32>", line))
    assert tables == 1 + one_pool


def paged_spec(page: int, layout: str, **options: Any) -> Any:
    shape = (P, 2, page, K, 64) if layout == "NHD" else (P, 2, K, page, 64)
    ints = {"page_table": (3, M), "key_value_seq_lengths": (3,)}
    return spec_of(
        query=struct(3, 1, N, 64), key_pages=struct(*shape), value_pages=None, kv_layout=layout,
        **{name: jax.ShapeDtypeStruct(x, jnp.int32) for name, x in ints.items()}, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page", "layout", "size", "value_page"),
    [
        (64, "NHD", 8, 8), (256, "NHD", 8, 32), (24, "NHD", 8, 3),
        (64, "HND", 64, 1), (256, "HND", 256, 1),
    ],
)  # fmt: skip
def test_a_page_with_heads_first_is_one_block(page: int, layout: str, size: int, value_page: int):
    """A page with heads first is one block, because its parts are not contiguous."""
    spec = paged_spec(page, layout)
    blocks = Blocks.of(spec)
    assert blocks is not None and blocks.size == size
    meaning = blocks.meaning(spec)
    assert (meaning.heads_first_kv, meaning.value_page) == (layout == "HND", value_page)


@pytest.mark.parametrize("page", [24, 512])
def test_pages_with_heads_first_are_not_cut_into_blocks(page: int):
    assert Blocks.of(paged_spec(page, "HND")) is None


@pytest.mark.parametrize("lengths", ["key_value_seq_lengths", "query_seq_lengths"])
def test_packed_gradients_have_rows_first(lengths: str):
    """cudnn-frontend's workspace is too small for other layouts: wrong results, illegal writes."""
    x, lengths_ = struct(2, 8, 64, 64), jax.ShapeDtypeStruct((2,), jnp.int32)
    spec = spec_of(query=x, key=x, value=x, qkv_layout="BNTH", **{lengths: lengths_})
    forward, backward = (variants_of(x) for x in spec.in_training(("query", "key", "value")))
    assert [(x.is_packed, x.head_rows_q, x.head_rows_kv) for x in forward] == [
        (True, 64, 64), (False, 64, 64)
    ]  # fmt: skip
    assert [(x.is_packed, x.head_rows_q, x.head_rows_kv) for x in backward] == [
        (True, 0, 0), (False, 64, 64)
    ]  # fmt: skip


@needs_cudnn
@pytest.mark.parametrize("side", ["head_rows_q", "head_rows_kv"])
def test_cudnn_library_refuses_packed_gradients_with_heads_first(side: str):
    backend = present(cudnn_library.find().backend)
    packed: dict[str, Any] = {
        "packed_rows_q": 512,
        "packed_rows_kv": 512,
        "has_lengths": True,
        "backward": True,
    }
    properties = cudnn_library.find().device_properties(parse("sm90"))
    backend.plan(cudnn_attributes(**packed), properties)
    with pytest.raises(
        backend.CudnnError, match=f"{side}: expected 0 in a backward pass of packed arrays, got 256"
    ):
        backend.plan(cudnn_attributes(**packed, **{side: 256}), properties)
    with pytest.raises(backend.CudnnError, match=f"{side}: expected 0 or the rows of .*, got 255"):
        backend.plan(cudnn_attributes(**{side: 255}), properties)


def test_layout_is_part_of_the_plan_and_of_the_tuning_key():
    specs = [spec_of(query=struct(2, 8, 8, 64), key=struct(2, 8, 8, 64), value=struct(2, 8, 8, 64),
                     qkv_layout=x) for x in ("BTNH", "BNTH")]  # fmt: skip
    rows, heads = (variants_of(spec)[0] for spec in specs)
    assert (rows.head_rows_q, rows.head_rows_kv) == (0, 0)
    assert (heads.head_rows_q, heads.head_rows_kv) == (8, 8)
    assert described(specs[0]) != described(specs[1])
