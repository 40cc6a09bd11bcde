"""ALiBi and a score_mod's sum as a bias on whole pages leave results unchanged."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.core.rewrites import Chain
from attn_dispatch.core.rewrites.as_mask_or_bias import SLOPES_AS_BIAS
from attn_dispatch.core.rewrites.kv_cache import whole_pages
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.mods_as_arrays import SUM_AS_BIAS
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.reference import poison_padding
from tests.support.kernel_stand_ins import by_xla, kernel
from tests.support.rewritten_calls import differ

_SUM = (Step("r tanh((t - s) / 16)", 0, 0, 1.0, 8, "n"),)
_CASES: dict[str, dict[str, Any]] = {
    "ALiBi": {"alibi": 1},
    "ALiBi of each row": {"alibi": 5},
    "ALiBi and a cap": {"alibi": 1, "soft_cap": 20.0},
    "ALiBi and a window": {"alibi": 5, "window": (290, 0)},
    "ALiBi and a window to both sides": {"alibi": 1, "window": (290, 1), "is_causal": False},
    "ALiBi without causality": {"alibi": 1, "is_causal": False},
    "some queries": {"alibi": 1, "q_lengths": (3, 1, 0, 2, 3)},
    "a sum": {"score_mod": _SUM},
    "a sum and a window": {"score_mod": _SUM, "window": (300, 0)},
}


def computed(case: Case) -> tuple[Any, Any]:
    """Results by the rewrites (NumPy as the kernel), and XLA's results with arrays."""
    options = case.forward_options()
    arrays = poison_padding(options, case.operands(), case.poison)
    operands = {name: jnp.asarray(x) for name, x in arrays.items()}
    expected = by_xla(spec_of(options, operands), operands)
    given = jax.jit(partial(in_pages, case))(operands)
    spec, steps = spec_of(paged_options(case, options), given), []
    as_bias = SLOPES_AS_BIAS if case.alibi else SUM_AS_BIAS
    for rewrite in (as_bias, WHOLE_PAGES, *([QUERIES_AS_HEADS] if case.t > 1 else [])):
        inner = rewrite.applied(spec)
        assert inner is not None, rewrite
        steps.append((rewrite, spec))
        spec = inner
    assert (spec.has("bias"), spec.seq_len_q) == (True, 1)
    chain = Chain(tuple(steps), spec, ())
    found = dict(zip(("out", "lse"), chain.compute(given, kernel, by_xla), strict=True))
    return found, expected


def differs(case: Case) -> bool:
    found, expected = computed(case)
    return differ(found, expected)


def case_of(name: str, t: int, page: int, **changes: Any) -> Case:
    facts: dict[str, Any] = {"b": 5, "n": 4, "k": 2, "h": 32, "v": 32, "t": t, "s": 576}
    facts |= {"dtype": "float16", "is_causal": True, "alignment": "bottom_right", "scale": 0.15}
    facts |= {"kv_lengths": (576, 63, 64, 0, 449), "inference": True, "page": page}
    if t == 1 and "q_lengths" in (changed := dict(_CASES[name])):
        changed["q_lengths"] = (1, 1, 0, 1, 1)
        return Case(f"bias/{name}, {t}, {page}", **facts | changed | changes)
    return Case(f"bias/{name}, {t}, {page}", **facts | _CASES[name] | changes)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("name", _CASES)
def test_bias_on_whole_pages_leaves_results_unchanged(name, t):
    for page in (1, 16, 24, 64):
        assert not differs(case_of(name, t, page)), page


@pytest.mark.parametrize("fault", ["one key later", "not moved with the window"])
def test_bias_of_other_keys_changes_results(fault, monkeypatch):
    bias_at = whole_pages._bias_at
    moved = {"one key later": lambda b, x: bias_at(b, x + 1),
             "not moved with the window": lambda b, x: bias_at(b, x - x[:, :1])}  # fmt: skip
    monkeypatch.setattr(whole_pages, "_bias_at", moved[fault])
    assert differs(case_of("ALiBi and a window", 1, 64))
