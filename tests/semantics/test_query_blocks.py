"""Ragged queries on pages, run as single queries and blocks, agree with the padded batch."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import inspection, paged, paged_attention
from attn_dispatch.semantics.query_blocks import QueryBlocks, block_size, fits_query_blocks
from attn_dispatch.semantics.ragged_queries import RaggedQueries
from attn_dispatch_tools.verify.seeded_random import SeededRandom
from attn_dispatch_tools.written_calls.json_file import calls_in, each_of

N, K, H = 4, 2, 16


def drawn_call(seed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options of a call drawn from `seed`; about one in three has invalid rows."""
    drawn, rng = SeededRandom(seed), np.random.default_rng(sum(map(ord, seed)))
    b, page, columns = drawn.between(2, 6), drawn.one_of((1, 4, 8, 24)), drawn.between(1, 12)
    capacity = page * columns
    lengths = [drawn.one_of((0, 1, 1, drawn.between(2, 40), drawn.between(2, 7))) for _ in range(b)]
    lengths[0] = max(lengths[0], 20)
    pages = [rng.standard_normal((b * columns + 2, page, K, H)) for _ in range(2)]
    table = rng.permutation(b * columns + 2)[: b * columns].reshape(b, columns)
    keys = rng.integers(0, capacity + 1, b)
    longest = max(lengths)
    if drawn.is_one_in(3):
        keys[drawn.up_to(b - 1)] = drawn.one_of((-1, capacity + 1))
        table[drawn.up_to(b - 1), drawn.up_to(columns - 1)] = -5
        longest = max(17, longest - drawn.one_of((0, 3)))
    options: dict[str, Any] = {"max_seqlen_q": longest, "return_lse": True}
    if drawn.is_one_in(3):
        options["local_window_size"] = (drawn.up_to(capacity), 0)
    options["is_causal"] = not drawn.is_one_in(4)
    if drawn.is_one_in(3):
        options["logits_soft_cap"] = 2.0
    for name in ("sinks", "alibi_slopes"):
        if drawn.is_one_in(3):
            x = rng.standard_normal((b, N) if drawn.is_one_in(2) else (N,))
            options[name] = jnp.asarray(np.abs(x), jnp.float32)
    arrays = {
        "query": jnp.asarray(rng.standard_normal((sum(lengths) + drawn.up_to(4), N, H)), "float32"),
        "key_pages": jnp.asarray(pages[0], "float32"),
        "value_pages": jnp.asarray(pages[1], "float32"),
        "page_table": jnp.asarray(table, "int32"),
        "key_value_seq_lengths": jnp.asarray(keys, "int32"),
        "cu_seqlens_q": jnp.asarray([0, *np.cumsum(lengths)], "int32"),
    }
    return arrays, options


def results(seed: str, monkeypatch: Any, *, in_blocks: bool, size: int | None = None) -> Any:
    arrays, options = drawn_call(seed)
    monkeypatch.setattr(
        paged, "fits_query_blocks", fits_query_blocks if in_blocks else lambda _: False
    )
    if size:
        monkeypatch.setattr(paged, "block_size", lambda _: size)
    names = [*arrays]
    call = jax.jit(lambda *x: paged_attention(**dict(zip(names, x, strict=True)), **options))
    return [np.asarray(x) for x in call(*arrays.values())]


def differs(seed: str, monkeypatch: Any, size: int) -> bool:
    expected = results(seed, monkeypatch, in_blocks=False)
    found = results(seed, monkeypatch, in_blocks=True, size=size)
    return not all(
        np.allclose(x, y, atol=3e-6, equal_nan=True) for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("seed", range(8))
def test_results_in_blocks_equal_those_of_the_padded_batch(seed, monkeypatch):
    assert not differs(f"blocks/{seed}", monkeypatch, size=(4, 16, 64)[seed % 3])


_QUERY_BLOCKS_OF = QueryBlocks.of


@pytest.mark.parametrize("field", ["first", "count", "row", "first_block", "is_single"])
def test_wrong_field_of_the_blocks_changes_results(field, monkeypatch):
    def broken(ragged: RaggedQueries, size: int) -> QueryBlocks:
        blocks = _QUERY_BLOCKS_OF(ragged, size)
        x = getattr(blocks, field)
        x = ~x if x.dtype == bool else jnp.maximum(x - 1, 0)
        object.__setattr__(blocks, field, x)
        return blocks

    monkeypatch.setattr(QueryBlocks, "of", staticmethod(broken))
    assert any(differs(f"blocks/{seed}", monkeypatch, size=4) for seed in (0, 1))


def test_number_of_blocks_suffices_for_any_lengths():
    """The number of blocks is exactly what the least favourable lengths need."""
    for lengths in ((2,) * 5 + (90,), (33, 33, 33, 1), (65, 0, 0, 35), (2, 2, 2, 2)):
        cu = jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
        blocks = QueryBlocks.of(RaggedQueries.of(cu, sum(lengths), 100), 32)
        assert int(blocks.count.sum()) == sum(x for x in lengths if x > 1)
        needed = sum(-(-x // 32) for x in lengths if x > 1)
        assert int((blocks.count > 0).sum()) == needed <= len(blocks.count)
    cu = jnp.asarray([0, 2, 4, 6, 8, 10, 42 + 58], jnp.int32)
    assert len(QueryBlocks.of(RaggedQueries.of(cu, 100, 100), 32).count) == 6 + 94 // 32


def test_calls_that_fit_query_blocks():
    struct = jax.ShapeDtypeStruct

    def spec(b: int = 3, t: int = 40, n: int = 4, **options: Any) -> Any:
        pools = {x: struct((9, 8, 2, 16), jnp.bfloat16) for x in ("key_pages", "value_pages")}
        arrays = {"page_table": struct((b, 4), jnp.int32)}
        arrays |= {x: struct((b,), jnp.int32)
                   for x in ("key_value_seq_lengths", "query_seq_lengths")}  # fmt: skip
        return inspection.spec_of(
            query=struct((b, t, n, 16), jnp.bfloat16), **pools, **arrays, **options
        )

    slopes: dict[str, Any] = {"alibi_slopes": struct((4,), jnp.float32)}
    assert fits_query_blocks(spec()) and fits_query_blocks(spec(is_causal=False))
    assert fits_query_blocks(spec(local_window_size=(5, 0))) and fits_query_blocks(spec(**slopes))
    assert not fits_query_blocks(spec(is_causal=False, **slopes))
    assert not fits_query_blocks(spec(is_causal=False, local_window_size=(5, 1)))
    assert not fits_query_blocks(spec(t=16)) and not fits_query_blocks(spec(b=1))
    assert not fits_query_blocks(spec(score_mod=lambda score, b, n, t, s: score + t))
    assert (block_size(spec()), block_size(spec(n=2)), block_size(spec(n=16))) == (
        64, 128, 32,
    )  # fmt: skip


def test_ragged_call_is_explained_as_single_queries_and_blocks(tmp_path):
    call = {
        "query": "bfloat16[544,8,64]", "key_pages": "bfloat16[300,64,2,64]",
        "value_pages": "key_pages", "page_table": "int32[33,64]",
        "key_value_seq_lengths": "int32[33]", "cu_seqlens_q": "int32[34]", "max_seqlen_q": 512,
    }  # fmt: skip
    file = tmp_path / "calls.json"
    file.write_text(json.dumps([call]))
    (_, singles), (_, blocks) = calls_in(file)
    assert (singles.batch, singles.seq_len_q, blocks.seq_len_q) == (33, 1, 32)
    ((_, found),) = each_of(file, partial(inspection.explain, target="sm90"))
    assert found.single_queries is not None
    assert (found.single_queries.call, found.call) == (singles, blocks)
    assert str(found).count("chosen    forward") == 2
    file.write_text(json.dumps([call | {"max_seqlen_q": 16}]))
    ((_, padded),) = calls_in(file)
    assert (padded.batch, padded.seq_len_q) == (33, 16)
