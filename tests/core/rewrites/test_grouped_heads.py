"""HEADS_AS_QUERIES: the heads of a group as queries on whole pages leave results unchanged."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.core.rewrites import Chain
from attn_dispatch.core.rewrites.kv_cache import grouped_heads
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.reference import poison_padding
from tests.support.extent import EVERY_SIZE
from tests.support.kernel_stand_ins import chain_results, results_by_xla
from tests.support.rewritten_calls import differ


def case_of(heads: tuple[int, int], t: int, page: int, **changes: Any) -> Case:
    facts: dict[str, Any] = {"b": 4, "n": heads[0], "k": heads[1], "h": 32, "v": 32, "t": t}
    facts |= {"s": 1280, "dtype": "float16", "is_causal": True, "alignment": "bottom_right"}
    facts |= {"kv_lengths": (1280, 63, 0, 700), "inference": True, "page": page, "scale": 0.15}
    return Case(f"grouped/{heads} {t} {page} {sorted(changes)}", **facts | changes)


def computed(case: Case) -> tuple[Any, Any, int]:
    """Results by the rewrites (NumPy as the kernel), XLA's results, and the number of key parts."""
    options = case.forward_options()
    arrays = poison_padding(options, case.operands(), case.poison)
    operands = {name: jnp.asarray(x) for name, x in arrays.items()}
    expected = results_by_xla(spec_of(options, operands), operands)
    given, spec, steps = operands, spec_of(options, operands), []
    if case.page:
        given = jax.jit(partial(in_pages, case))(operands)
        spec = spec_of(paged_options(case, options), given)
    for rewrite in (WHOLE_PAGES, HEADS_AS_QUERIES):
        inner = rewrite.applied(spec)
        assert inner is not None, rewrite
        steps.append((rewrite, spec))
        spec = inner
    chain = Chain(tuple(steps), spec, (), tuple(_side_call(x) for x in steps[:1] if case.t > 16))
    found = dict(zip(("out", "lse"), chain_results(chain, given), strict=True))
    return found, expected, spec.batch // case.b


def _side_call(step: Any) -> Any:
    rewrite, spec = step
    beside = rewrite.beside(spec)
    return beside, Chain((), beside, ())


def differs(case: Case) -> bool:
    found, expected, _ = computed(case)
    return differ(found, expected)


OPTIONS: tuple[tuple[tuple[int, int], int, dict[str, Any]], ...] = (
    ((8, 1), 5, {}),
    ((8, 2), 16, {}),
    ((16, 2), 5, {"q_lengths": (5, 0, 2, 1), "soft_cap": 20.0}),
    ((6, 2), 16, {"is_causal": False}),
    ((8, 1), 7, {"window": (600, 0)}),
    ((4, 4), 40, {"soft_cap": 20.0, "s": 2048}),
    ((8, 2), 33, {"q_lengths": (33, 0, 2, 1)}),
)


@pytest.mark.parametrize(
    ("page", "heads", "t", "options"),
    [
        (page, *x)
        for i, x in enumerate(OPTIONS)
        for page in (0, 16, 24, 64)
        if EVERY_SIZE or page in ((0, 24), (16, 64))[i % 2]
    ],
    ids=str,
)
def test_heads_as_queries_leave_results_unchanged(page, heads, t, options):
    if (t > 16 and not page) or (page == 24 and "s" in options):
        return  # arrays run packed; for pages of 24, s is set below
    # The length is a multiple of 256 and of the page, so of 768 for pages of 24.
    s = {"s": 1536, "kv_lengths": (1536, 63, 0, 700)} if page == 24 else {}
    assert not differs(case_of(heads, t, page, **options | s))


def test_keys_are_split_where_tiles_are_few():
    assert computed(case_of((8, 1), 5, 64, s=2048))[2] == 8
    assert computed(case_of((8, 1), 5, 64))[2] == 1  # 5 tables of 256 keys


@pytest.mark.parametrize("step", ["merged_parts", "_group"])
def test_broken_step_changes_results(step, monkeypatch):
    """A mean instead of a merge of parts, and heads that become queries in another order."""
    case = case_of((8, 2), 16, 64, s=1024, kv_lengths=(1024, 63, 0, 700))
    if step == "merged_parts":
        mean = lambda out, lse: (out.mean(axis=1), lse.max(axis=1))  # noqa: E731
        monkeypatch.setattr(grouped_heads, "merged_parts", mean)
    else:
        monkeypatch.setattr(grouped_heads.jnp, "swapaxes", lambda x, *axes: x.reshape(
            np.swapaxes(np.zeros(x.shape, bool), *axes).shape))  # fmt: skip
    assert differs(case)
