"""Every rewrite, with NumPy as the kernel, gives the original call's results and gradients.

The kernel refuses what cuDNN's rules refuse and the features named in `without`; it computes in
float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.operands import fitted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import (
    REWRITES,
    Chain,
    Rewrite,
    Terms,
    as_mask_or_bias,
    empty,
    mods_as_arguments,
    packed_as_padded,
    rewritten,
    row_bias,
    sinks,
    value_columns,
    wide_heads,
)
from attn_dispatch.core.rewrites.dropout_keys import CALL_FOR_EACH_KEY
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.near_keys import NEAR_KEYS
from attn_dispatch.core.rewrites.kv_cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.narrow_bias import NARROW_BIAS
from attn_dispatch.core.rewrites.one_diagonal import ONE_DIAGONAL
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.programs.known_forms import known_form
from attn_dispatch.reason import Reason
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch.semantics.sinks import sinks_grad
from attn_dispatch.semantics.sums import sum_like
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.reference import Operands, poison_padding, reference
from tests.support.comparing import check, poisoned, to_jax
from tests.support.kernel_stand_ins import chain_results, kernel_reasons, specs_of
from tests.support.small_cases import SMALL

NamedArrays = dict[str, Any]

SUM, OF_HEADS = ((Step("r tanh((t - s) / 16)", 0, 0, 1.0, 8, read),) for read in "sn")
CAP, SLOPES = ((Step(name, 0, 0, 1.5, 8, "n"),) for name in ("soft cap", "ALiBi"))
EVERY_THIRD = ("s == t or (t - s) % w == 0", 3)
_WIDE: dict[str, Any] = {"h": 16, "t": 6, "s": 7}


def chain_of(spec: AttentionSpec, without: tuple[str, ...] = (), first: str = "") -> Chain:
    def reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
        missing = {
            "mask": spec.has("mask"),
            "score_mod": spec.meaning.score_mod is not None,
            "sinks": spec.has("sinks"),
            "alibi": spec.has("alibi_slopes"),
            "row maximum": spec.wanted.needs_max,
            "row bias": spec.has("bias") and spec.shape("bias")[3] == 1,
            "lengths": spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths"),
            "packed": spec.has("query_segment_ids") or spec.has("cu_seqlens_q"),
            "narrow heads": spec.head_dim < 256,
            "narrow values": spec.head_dim_v < spec.head_dim,
            "bias gradient": "bias" in spec.wanted.gradients,
            "beyond 256": spec.head_dim_v + 8 * spec.has("lse_grad") > 256,
            "beyond 128": spec.head_dim_v + 8 * spec.has("lse_grad") > 128,
        }
        return (*kernel_reasons(spec), *(Reason(x) for x in without if missing[x]))

    return rewritten(spec, Terms(reasons, first=first or None))


def computed(chain: Chain, operands: Operands) -> tuple:
    given = to_jax(operands)
    first = chain.steps[0][1] if chain.steps else chain.spec
    if first.is_backward:
        given = without_nan_lse(first, given)  # as core/primitive.py does
    return chain_results(chain, given)


def rewrites_of(case: Case, without: tuple[str, ...] = ()) -> set[str]:
    """The names of the rewrites that the case needs to run."""
    chains = [chain_of(x, without) for x in specs_of(case, needs_keep=case.dropout > 0)]
    return {name for chain in chains if not chain.reasons for name in chain.names}


def test_rewrites_that_undo_each_other_do_not_loop():
    """Value as wide as key is refused, and so is narrower value: each rewrite undoes the other."""
    (spec,) = specs_of(Case("undone", h=256, v=200, inference=True), needs_keep=False)
    chain = chain_of(spec, ("narrow values", "beyond 128"))
    assert chain.reasons and len(chain.names) == len(chain.steps) == 2


def test_both_directions_under_dropout_widen_their_heads_or_neither():
    """The forward call decides, and the backward call follows."""
    forward, backward = specs_of(Case("wider", dropout=0.5, **_WIDE), needs_keep=False)

    def refuses(refused: AttentionSpec) -> Chain:
        def reasons(x: AttentionSpec) -> tuple[Reason, ...]:
            is_refused = x.head_dim < 256 and x.is_backward >= refused.is_backward
            return (Reason("narrow"),) * is_refused

        return rewritten(backward, Terms(reasons))

    assert [x.reasons for x in map(refuses, (forward, backward))] == [(), (Reason("narrow"),)]


def judge(case: Case, without: tuple[str, ...] = ()) -> None:
    """Compare the directions that run with the reference."""
    operands, drops = case.operands(), case.dropout > 0
    forward, *backward = specs_of(case, needs_keep=drops)
    chain = chain_of(forward, without, case.rewrite)
    if chain.reasons:
        return
    assert not case.rewrite or case.rewrite in chain.names
    results = computed(chain, poison_padding(forward.options, operands))
    keep = np.asarray(results[forward.result_names.index("keep")]) if drops else None
    exact = reference(forward.options, operands, keep)
    check(forward, results, exact)
    for spec in backward:
        chain = chain_of(spec, without, case.rewrite)
        if chain.reasons:
            continue
        given = operands | case.cotangents()
        given |= {name: exact[name].astype(np.float32) for name in ("out", "lse")}
        results = computed(chain, poisoned(spec, given))
        check(spec, results, reference(spec.options, given, keep))


NAMED = (
    Case("row_bias_without_keys", bias=(1, 4, 10, 1), infinite_bias=True, sinks=2, lse_grad=True),
    Case("row_bias_wrong", bias=(1, 1, 10, 1), infinite_bias=True, q_lengths=(-2, 9)),
    Case(
        "row_bias_wrong_sinks", bias=(2, 1, 10, 1), infinite_bias=True, kv_lengths=(15, 3), sinks=1
    ),
    Case("mask_bias", bias=(1, 4, 10, 14), mask=(2, 1, 10, 14), dead_rows=True),
    Case("slopes_bias", alibi=2, bias=(1, 1, 10, 14)),
    Case("slopes_sinks", alibi=1, sinks=1, is_causal=True, lse_grad=True),
    Case("bias_sinks", bias=(2, 4, 10, 14), sinks=2, lse_grad=True),
    Case("two_keys", dropout=0.4, dropout_keys=2, bias=(1, 4, 10, 14), sinks=2),
    Case("value_256", v=256, lse_grad=True, bias=(2, 1, 6, 7), **_WIDE),
    Case("value_261", v=261, dropout=0.3, is_causal=True, **_WIDE),
    Case("value_300", v=300, lse_grad=True, sinks=1, **_WIDE),
    Case("value_136", v=136, kv_lengths=(3, 7), **_WIDE),
    Case("no_queries", t=0, lse_grad=True, bias=(2, 1, 1, 14)),
    Case("no_keys", s=0, sinks=1, is_causal=True),
    Case("nothing", t=0, s=0, needs_max=True),
    Case("window_array", window_arrays=((3, 2),), bias=(1, 4, 10, 14)),
    Case("window_arrays", window_arrays=((3, 2), (-1, 4)), alignment="bottom_right", sinks=2),
    Case("window_array_lengths", window_arrays=((2, 1),), kv_lengths=(9, 0), is_causal=True),
    Case("sum_by_distance", score_mod=OF_HEADS, is_causal=True, wanted=("key", "score_mod_0")),
    Case("sum", score_mod=SUM, is_causal=True, lse_grad=True),
    Case("sum_lengths", score_mod=SUM, kv_lengths=(9, 0), bias=(2, 1, 10, 14), mods_start=(1, 1)),
    Case("sum_copies", b=4, score_mod=SUM, own_arrays=True, transform="vmap", mask=(4, 1, 10, 14)),
    Case(
        "sum_packed",
        score_mod=SUM,
        q_segments=((1,) * 4 + (2,) * 6,) * 2,
        max_segments=2,
        kv_segments=((1,) * 9 + (2,) * 5, (1,) * 5 + (2,) * 9),
        is_causal=True,
    ),
    Case("cap_mod", score_mod=CAP, is_causal=True, bias=(1, 4, 10, 14)),
    Case("cap_mod_lengths", score_mod=CAP, kv_lengths=(9, 0), sinks=1),
    Case("slopes_mod", score_mod=SLOPES, is_causal=True, lse_grad=True, mods_start=(1, 1)),
    Case("slopes_mod_bias", score_mod=SLOPES, bias=(2, 1, 10, 14), wanted=("query", "score_mod_0")),
    Case("slopes_mod_copies", b=4, score_mod=SLOPES, own_arrays=True, transform="vmap"),
    Case("mask_mod", mask_mod=EVERY_THIRD, is_causal=True, bias=(1, 4, 10, 14)),
    Case("mask_mod_mask", mask_mod=EVERY_THIRD, score_mod=SUM, mask=(2, 1, 1, 14), sinks=1),
    Case(
        "mask_mod_ragged",
        mask_mod=EVERY_THIRD,
        cu_q=((0, 2, 7), (0, 5, 10)),
        cu_kv=((0, 5, 9), (0, 3, 14)),
        longest=(5, 11),
        lse_grad=True,
    ),
    Case("value_128", v=128, lse_grad=True, alibi=1, **_WIDE),
    Case(
        "packed_slopes",
        alibi=1,
        bias=(1, 4, 10, 14),
        q_segments=((1,) * 4 + (2,) * 6,) * 2,
        kv_segments=((1,) * 9 + (2,) * 5, (1,) * 5 + (2,) * 9),
        lse_grad=True,
    ),
)
APPLIED_FIRST = (
    Case("sinks_then_slopes", alibi=1, sinks=1, wanted=("query", "alibi_slopes")),
    Case("sinks_then_bias", bias=(1, 4, 10, 1), sinks=1, lse_grad=True),
)
"""A rewrite that uses an lse with sinks must not come after the one that removes sinks."""

_ENOUGH = 4
_WITHOUT = (
    ("score_mod",), ("sinks", "mask"), ("sinks", "bias gradient"),
    ("row maximum", "narrow heads"), ("lengths", "alibi"), ("packed",),
    ("narrow values", "row bias"), ("bias gradient",), ("score_mod", "alibi"),
    ("beyond 256",), ("beyond 128",), (),
)  # fmt: skip

Refused = tuple[Case, tuple[str, ...]]


def cases_by_rewrite() -> dict[str, list[Refused]]:
    """For each rewrite, by name, some cases that need it, with the features that are refused."""
    drawn = [
        replace(case, dtype="float32", bias_dtype="float32", score_shift=0.0, magnitude=1.0)
        for case in draws.examples(200, 7, draws.SMALL)
        if abs(case.scale) > 1e-3
    ]
    found: dict[str, list[Refused]] = {rewrite.name: [] for rewrite in REWRITES}
    for without in _WITHOUT:
        for case in (*NAMED, *SMALL, *drawn):
            names = rewrites_of(case, without)
            if any(len(found[name]) < _ENOUGH for name in names):
                for name in names:
                    found[name].append((case, without))
    return found


CASES = cases_by_rewrite()


@pytest.mark.parametrize(
    "refused",
    list(dict.fromkeys(x for found in CASES.values() for x in found)),
    ids=lambda refused: f"{refused[0]}, without {', '.join(refused[1]) or 'nothing'}",
)
def test_rewritten_results_and_gradients_agree_with_the_reference(refused: Refused):
    judge(*refused)


@pytest.mark.parametrize("case", APPLIED_FIRST, ids=str)
def test_sinks_rewrite_applied_first_agrees_with_the_reference(case: Case):
    judge(replace(case, rewrite=sinks.SINKS_AFTERWARDS.name))


def test_every_rewrite_has_cases():
    without_cases = {name for name, found in CASES.items() if len(found) < 3}
    assert NARROW_BIAS.name in without_cases  # these are float32: tests/aiter/test_public.py
    serving_rewrites = (
        NEAR_KEYS, QUERIES_AS_HEADS, HEADS_AS_QUERIES, WHOLE_PAGES, SMALLER_PAGES,
        PAGES_GATHERED,
    )  # fmt: skip
    serving = {x.name for x in serving_rewrites}  # test_paged.py, test_whole_pages.py
    windows = ONE_DIAGONAL.name  # test_one_diagonal.py
    assert without_cases - {NARROW_BIAS.name, windows} <= serving


def _no_positions(spec: AttentionSpec, operands: NamedArrays, positions: Any) -> Any:
    return operands.get("mask", jnp.ones((1, 1, 1, 1), bool))


def _nan_kept(spec: AttentionSpec, operands: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
    batch = spec.batch
    none_invalid = {"query": spec.seq_len_q, "key": spec.seq_len_kv}
    return {}, {name: jnp.zeros((batch, length), bool) for name, length in none_invalid.items()}


def _doubled(name: str, x: Any, sizes: Mapping[str, int]) -> Any:
    x = fitted(name, x, sizes)
    return 2 * x if name == "value" else x


def _with_ones(name: str, x: Any, sizes: Mapping[str, int]) -> Any:
    """Ones in place of the zeros that pad."""
    found = fitted(name, x, sizes)
    return fitted(name, x - 1, sizes) + 1 if found.size > x.size else found


_COMPUTE = CALL_FOR_EACH_KEY.compute
_XLA_ARRAY, _ALONG_DIAGONALS = mods.xla_array, mods._along_diagonals


def _keys_reversed(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    if spec.is_backward:
        operands = operands | {"dropout_key": operands["dropout_key"][::-1]}
    return _COMPUTE(spec, inner, operands, calls)


BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "no sink": ("sinks", sinks, "with_sinks", lambda results, _: results),
    "a sink's gradient": ("sinks", sinks, "sinks_grad", lambda spec, x: -sinks_grad(spec, x)),
    "rows without keys": ("a bias that is", row_bias, "_cleared", lambda is_padding, x: x),
    "a row's gradient": (
        "a bias that is", row_bias, "_row_grad", lambda spec, x: jnp.zeros_like(x["lse"]) + 1
    ),
    "keys in another order": ("dropout keys", CALL_FOR_EACH_KEY, "compute", _keys_reversed),
    "columns twice": ("value: a call for at most 128", value_columns, "fitted", _doubled),
    "no positions": ("causality and window", as_mask_or_bias, "allowed", _no_positions),
    "no segments": ("sequences", as_mask_or_bias, "allowed", _no_positions),
    "NaN kept": ("sequences", as_mask_or_bias, "_without_nan", _nan_kept),
    "a sum": ("ALiBi", as_mask_or_bias, "sum_like", lambda x, shape: 2 * sum_like(x, shape)),
    "the mask's gradient": (
        "the mask", as_mask_or_bias, "sum_like", lambda x, shape: 2 * sum_like(x, shape),
    ),
    "positions": (
        "packed sequences: as", packed_as_padded._Places, "_within", lambda self: 0 * self.sequence
    ),
    "constants": (
        "an axis", empty.NO_SCORES, "compute",
        lambda spec, inner, x, calls: {name: 1 + y for name, y in calls.xla(spec, x).items()},
    ),
    "one key more": (
        "mask_mod: as lengths", mods, "xla_array", lambda *given: 1 + _XLA_ARRAY(*given)
    ),
    "other slopes": (
        "score_mod: as alibi", mods, "xla_array", lambda *given: 2 * _XLA_ARRAY(*given)
    ),
    "another cap": (
        "score_mod: as logits", mods_as_arguments, "score_mod_form",
        lambda spec: None if spec.meaning.score_mod is None
        else replace(known_form(spec.meaning.score_mod), soft_cap=3.0),
    ),
    "another diagonal": (
        "score_mod: what it adds", mods, "_along_diagonals",
        lambda x, queries, keys: jnp.roll(_ALONG_DIAGONALS(x, queries, keys), 1, axis=3),
    ),
    "columns": ("head dim", wide_heads, "fitted", _with_ones),
}  # fmt: skip
"""By fault: the start of a rewrite's name, and a replacement that breaks the rewrite."""


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_rewrite_changes_results(fault: str, monkeypatch):
    part, module, name, wrong = BROKEN[fault]
    (rewrite,) = (x.name for x in REWRITES if x.name.startswith(part))
    if isinstance(module, Rewrite):
        monkeypatch.setitem(vars(module), name, wrong)  # it is frozen
    else:
        monkeypatch.setattr(module, name, wrong)

    def differs(refused: Refused) -> bool:
        try:
            judge(*refused)
        except Exception:
            return True
        return False

    assert any(differs(refused) for refused in CASES[rewrite])
