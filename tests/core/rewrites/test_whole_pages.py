"""WHOLE_PAGES: the kernel gets only full pages, the ends run separately; results are unchanged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import inspection
from attn_dispatch.core.eligibility import reasons_and_chain
from attn_dispatch.core.rewrites.as_mask_or_bias import SLOPES_AS_BIAS
from attn_dispatch.core.rewrites.kv_cache import whole_pages
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.near_keys import NEAR_KEYS
from attn_dispatch.core.rewrites.kv_cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.mods_as_arguments import SCORE_MOD_AS_CAP
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.core.rewrites.sinks import SINKS_AFTERWARDS
from attn_dispatch.core.select import named
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.cache_cases import CACHE
from attn_dispatch_tools.verify.case import Case
from tests.support.backend import needs_cudnn
from tests.support.extent import EVERY_PLAN
from tests.support.kernel_stand_ins import by_xla, kernel
from tests.support.present import present
from tests.support.rewritten_calls import rewrite_results

NAMED = {case.name: case for case in CACHE}

_OPTIONS = (
    "plain", "cap", "window", "window_to_both_sides", "cap_and_window", "sinks_and_cap", "full"
)  # fmt: skip
CHOSEN = [
    f"cache/whole_{options}_t{t}_page{page}"
    for i, options in enumerate(_OPTIONS)
    for j, t in enumerate((1, 3, 33))
    for k, page in enumerate((0, 24, 64))
    if (i + j + k) % 3 == 0
] + [x for x in NAMED if x.startswith(("cache/whole_d", "cache/chunk_t9"))]
"""Every pair of options, queries and page sizes occurs; a third of all triples."""


def differs(case: Case, compute: Any, rewrite: Any = None) -> bool | None:
    """True if the rewrite changes the call's results; None if it does not apply."""
    results = rewrite_results(rewrite or WHOLE_PAGES, case, compute)
    if results is None:
        return None
    found, expected = results
    for name, x in found.items():
        x, y = (np.asarray(z, np.float32) for z in (x, expected[name]))
        same = (np.isnan(x) == np.isnan(y)).all() and ((x == -np.inf) == (y == -np.inf)).all()
        if not same or not np.allclose(x, y, atol=0.02, rtol=0.01, equal_nan=True):
            return True
    return False


@pytest.mark.parametrize("compute", [by_xla, kernel], ids=["xla", "cudnn"])
def test_whole_pages_leave_results_unchanged(compute):
    """By XLA, and by NumPy as cuDNN's kernels, which multiply by everything in a page."""
    found = 0
    for name in CHOSEN:
        case = NAMED[name]
        if not (case.sinks and compute is kernel):
            is_different = differs(case, compute)
            assert not is_different, name
            found += is_different is not None
    assert found >= 12


def test_pages_whose_size_is_no_power_of_two_are_cut():
    for name in ("cache/whole_plain_t1_page24", "cache/whole_cap_t33_page24"):
        assert differs(NAMED[name], by_xla, SMALLER_PAGES) is False


_ENDS_OF = whole_pages._Ends.of


def _broken(**changes: Any) -> Any:
    def of(*args: Any) -> Any:
        ends = _ENDS_OF(*args)
        fields = {name: change(getattr(ends, name)) for name, change in changes.items()}
        return replace(ends, **fields)

    return of


@pytest.mark.parametrize(
    "changes",
    [
        {"count": lambda x: x + 1},
        {"count": lambda x: jnp.maximum(x - 1, 0)},
        {"first": lambda x: x + 1},
        {"first": lambda x: jnp.maximum(x - 1, 0)},
        {"first": jnp.zeros_like},
        {"keys": lambda x: jnp.maximum(x - 1, 0)},
        {"queries": lambda x: jnp.maximum(x - 1, 0)},
    ],
    ids=["a page more", "a page less", "a page late", "a page early", "a table not rotated",
         "a key less", "a query less"],
)  # fmt: skip
def test_wrong_ends_change_results(changes, monkeypatch):
    monkeypatch.setattr(whole_pages._Ends, "of", staticmethod(_broken(**changes)))
    names = ("cap_t1_page64", "cap_and_window_t3_page64", "plain_t33_page64")
    assert any(differs(NAMED[f"cache/whole_{x}"], kernel) for x in names)


@pytest.mark.parametrize("fault", ["tile", "other row"])
def test_table_that_exposes_other_pages_changes_results(fault, monkeypatch):
    """A table that ends inside a tile, and one that has another row's page past the length."""
    if fault == "tile":
        monkeypatch.setattr(whole_pages, "_TILE", 1)
        case = NAMED["cache/whole_plain_t33_page64"]
    else:
        monkeypatch.setattr(whole_pages.jnp, "minimum", lambda x, y: x + 0 * y)
        case = NAMED["cache/whole_cap_t1_page64"]
    assert differs(case, kernel)


W, Q, S = (x.name for x in (WHOLE_PAGES, QUERIES_AS_HEADS, SINKS_AFTERWARDS))
A, C, G = (x.name for x in (SLOPES_AS_BIAS, SCORE_MOD_AS_CAP, HEADS_AS_QUERIES))


def capped(score: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
    return 30 * jnp.tanh(score / 30)


USED: tuple[tuple[int, int, dict[str, Any], tuple[str, ...]], ...] = (
    (1, 16, {"logits_soft_cap": 30.0}, (W,)),
    (1, 0, {"logits_soft_cap": 30.0}, (W,)),
    (4, 16, {"logits_soft_cap": 30.0}, (W, Q)),
    (1, 16, {"local_window_size": (5000, 0)}, (W,)),
    (4, 0, {"local_window_size": (5000, 0)}, (W, Q)),
    (16, 16, {}, (W, G)),
    (8, 0, {}, (Q,)),
    (9, 0, {}, (W, G)),
    (4, 0, {"sinks": 1}, (S, Q)),
    (1, 0, {"sinks": 1}, (S,)),
    (256, 16, {}, (W,)),
    (256, 16, {"sinks": 1}, (S, W)),
    (256, 16, {"local_window_size": (1023, 0)}, (NEAR_KEYS.name,)),
    (1, 16, {"alibi_slopes": 1}, (A, W)),
    (4, 16, {"alibi_slopes": 1, "sinks": 1}, (S, A, W, Q)),
    (1, 16, {"alibi_slopes": 1, "local_window_size": (5000, 0)}, (A, W)),
    (1, 16, {"score_mod": "capped"}, (C, W)),
    (256, 16, {"score_mod": "capped"}, (C, W)),
    (100, 16, {"query_seq_lengths": 1}, (W, G)),
    (256, 16, {"query_seq_lengths": 1}, (PAGES_GATHERED.name,)),
    (1, 24, {}, (SMALLER_PAGES.name,)),
    (256, 24, {}, (W,)),
    (256, 3, {}, (PAGES_GATHERED.name,)),
)
"""Queries, keys of a page (0 without pages), options, and the rewrites by which cuDNN runs it."""


@needs_cudnn
@pytest.mark.parametrize(
    ("target", "t", "page", "options", "expected"),
    [
        (target, *row)
        for i, row in enumerate(USED)
        for j, target in enumerate(("sm80", "sm100", "sm90"))
        if EVERY_PLAN or j in (i % 2, 2)
    ],
    ids=str,
)
def test_rewrites_that_cudnn_uses_for_a_cache(target, t, page, options, expected):
    struct, b, n, k, s = jax.ShapeDtypeStruct, 4, 32, 8, 6144
    given: dict[str, Any] = {"key_value_seq_lengths": struct((b,), jnp.int32)} | options
    for name in given.keys() & {"sinks", "alibi_slopes"}:
        given[name] = struct((n,), jnp.float32)
    if "score_mod" in given:
        given["score_mod"] = capped  # a name above, so that ids are the same in every process
    if "query_seq_lengths" in given:
        given["query_seq_lengths"] = struct((b,), jnp.int32)
    if page:
        pools = {x: struct((900, page, k, 128), jnp.bfloat16) for x in ("key_pages", "value_pages")}
        given |= pools | {"page_table": struct((b, s // page), jnp.int32)}
        arrays = ()
    else:
        arrays = (struct((b, s, k, 128), jnp.bfloat16),) * 2
        given |= {"is_causal": True, "causal_alignment": "bottom_right"}
    query = struct((b, t, n, 128), jnp.bfloat16)
    given |= {"query": query} | dict(zip(("key", "value"), arrays, strict=False))
    spec = inspection.spec_of(**given)
    reasons, chain = reasons_and_chain(named("cudnn"), spec, parse(target))
    assert (reasons, chain.names) == ((), expected)


@pytest.mark.parametrize("compute", [by_xla, kernel], ids=["xla", "cudnn"])
@pytest.mark.parametrize("t", [1, 3])
def test_pages_behind_a_window_may_be_missing(compute, t):
    """Pages behind the window are missing; row 3 also lacks one that it needs. Page 0 is NaN."""
    b, page, columns, window = 4, 8, 48, 100
    rng = np.random.default_rng(5)
    pools = [rng.standard_normal((b * columns + 1, page, 2, 16)) for _ in range(2)]
    for pool in pools:
        pool[0] = np.nan
    table = 1 + rng.permutation(b * columns).reshape(b, columns).astype(np.int32)
    lengths, whole = np.array([380, 0, 77, 384], np.int32), table.copy()
    for row in (0, 3):
        table[row, : (lengths[row] - t - window) // page] = -1
    table[3, 40] = -1
    query = rng.standard_normal((b, t, 4, 16))
    names = ("query", "key_pages", "value_pages")
    arrays = dict(zip(names, (jnp.asarray(x, "float16") for x in (query, *pools)), strict=True))
    arrays |= {"page_table": jnp.asarray(table), "key_value_seq_lengths": jnp.asarray(lengths)}
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    spec = inspection.spec_of(**given, local_window_size=(window, 0))
    operands = arrays | {x: arrays[x][None] for x in names[1:]}
    inner = present(WHOLE_PAGES.applied(spec))
    calls = Calls(partial(compute, inner), by_xla, compute)
    found = WHOLE_PAGES.compute(spec, inner, operands, calls)["out"]
    assert np.isnan(np.asarray(found[3], np.float32)).all()
    expected = by_xla(spec, operands | {"page_table": jnp.asarray(whole)})["out"]
    close = partial(np.testing.assert_allclose, atol=0.005, rtol=0.01)
    close(np.asarray(found[:3], np.float32), np.asarray(expected[:3], np.float32))
