"""ONE_DIAGONAL: gradients of a bottom-right window, with queries and keys on one diagonal."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import one_diagonal
from attn_dispatch.core.rewrites.one_diagonal import ONE_DIAGONAL
from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn.call import band_of, variants_of
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import reference
from tests.support.backend import needs_cudnn
from tests.support.comparing import check, poisoned, to_jax
from tests.support.cudnn_in_numpy import run
from tests.support.kernel_stand_ins import kernel_reasons
from tests.support.option_parts import spec_with
from tests.support.present import present

SHAPES = ((7, 33, 3), (33, 33, 9), (33, 7, 3), (1, 33, 0), (7, 16, 15))
"""T, S and the left side of the window."""


def drawn(seed: int) -> Case:
    """A drawn call with a bottom-right window; some lengths are invalid."""
    rng = np.random.default_rng(seed)
    # Few shapes, because JAX compiles every operation for each.
    t, s, left = SHAPES[seed % len(SHAPES)]

    def lengths(full: int) -> tuple[int, ...] | None:
        if rng.random() < 0.4:
            return None
        return tuple(int(x) for x in rng.choice([0, 1, full // 2, full - 1, full, full + 1, -1], 3))

    return Case(
        f"one diagonal/{seed}",
        b=3, t=t, s=s, n=4, k=2, h=8, v=8,
        is_causal=seed % 2 == 0, alignment="bottom_right", window=(left, 0 if seed % 2 else None),
        q_lengths=lengths(t), kv_lengths=lengths(s),
        soft_cap=2.0 if rng.random() < 0.2 else None, sinks=1 if rng.random() < 0.3 else None,
        score_shift=90.0 if rng.random() < 0.2 else 0.0,
        lse_grad=bool(rng.random() < 0.4), heads_first=str(rng.choice(["", "q", "kv", "q kv"])),
    )  # fmt: skip


CASES = [drawn(seed) for seed in range(30)]


@pytest.fixture(autouse=True)
def _apply_to_small_calls(monkeypatch):
    monkeypatch.setattr(one_diagonal, "_LEAST_SAVED", 0)
    monkeypatch.setattr(one_diagonal, "_TILE", 1)


def kernel(spec: AttentionSpec, operands: Any) -> dict[str, Any]:
    assert not kernel_reasons(spec) and present(band_of(spec)).bottom_right is False
    call = variants_of(spec)[0]
    done = run(call, cudnn_arrays.backward_operands(spec, call, operands))
    results = cudnn_arrays.backward_results(spec, call, operands, to_jax(done))
    return dict(zip(spec.result_names, results, strict=True))


def judge(case: Case) -> AttentionSpec:
    operands = case.operands() | case.cotangents()
    exact = reference(case.forward_options(), case.operands())
    operands |= {name: exact[name].astype(np.float32) for name in ("out", "lse")}
    spec = spec_of(case.backward_options(), operands)
    inner = ONE_DIAGONAL.applied(spec)
    assert inner is not None
    given = without_nan_lse(spec, to_jax(poisoned(spec, operands)))
    calls = Calls(partial(kernel, inner), kernel, kernel)
    results = ONE_DIAGONAL.compute(spec, inner, given, calls)
    in_order = tuple(results[name] for name in spec.result_names)
    check(spec, in_order, reference(spec.options, operands, None))
    return inner


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_agree_with_the_reference(case: Case):
    judge(case)


def test_draws_cover_every_kind():
    facts = {
        "lengths": any(x.q_lengths and x.kv_lengths for x in CASES),
        "none": any(x.q_lengths is x.kv_lengths is None for x in CASES),
        "more queries than keys": any(x.t > x.s for x in CASES),
        "more keys than queries and window": any(x.s > x.t + (x.window[0] or 0) for x in CASES),
        "sinks with large scores": any(x.sinks and x.score_shift for x in CASES),
    }
    assert all(facts.values()), facts


BROKEN: dict[str, Any] = {
    "NO_WEIGHT": 0.0,
    "_rows": lambda spec, left: min(spec.seq_len_q + left - 1, spec.seq_len_kv),
    "row_lengths": lambda spec, operands, side: jnp.full(
        (spec.batch,), spec.seq_len_q if side == "query" else spec.seq_len_kv, jnp.int32
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_step_changes_gradients(name: str, monkeypatch):
    monkeypatch.setattr(one_diagonal, name, BROKEN[name])

    def differs(case: Case) -> bool:
        try:
            judge(case)
        except AssertionError:
            return True
        return False

    assert any(map(differs, CASES))


@pytest.mark.parametrize(
    "case",
    [
        Case("forward", window=(3, 0), alignment="bottom_right", inference=True),
        Case("top left", window=(3, 0)),
        Case("open on the right", window=(3, None), alignment="bottom_right"),
        Case("wide on the right", window=(3, 1), alignment="bottom_right"),
        Case("causal alone", is_causal=True, alignment="bottom_right"),
        Case("bias", window=(3, 0), alignment="bottom_right", bias=(1, 1, 10, 14)),
        Case("dropout", window=(3, 0), alignment="bottom_right", dropout=0.3),
    ],
    ids=str,
)
def test_rewrite_does_not_apply_to_other_calls(case: Case):
    spec = spec_of(case.forward_options(), case.avals())
    if case.gradients:
        spec = spec.backward(case.backward_options())
    assert ONE_DIAGONAL.applied(spec) is None


def test_equal_lengths_make_both_alignments_the_same():
    case = Case("equal", t=14, window=(3, 0), alignment="bottom_right", kv_lengths=(9, 14))
    spec = spec_of(case.forward_options(), case.avals())
    assert present(band_of(spec)).bottom_right
    same = spec_with(spec, same_lengths=True)
    assert not present(band_of(same)).bottom_right


@needs_cudnn
@pytest.mark.parametrize(
    ("t", "s", "left", "is_used"),
    [(2048, 4096, 255, True), (512, 1024, 511, False)],
)
def test_cudnn_uses_the_rewrite_where_it_saves_time(t, s, left, is_used, monkeypatch):
    monkeypatch.undo()
    query, key = (jnp.zeros((1, x, 4, 64), jnp.bfloat16) for x in (t, s))
    explanation = attn_dispatch.explain(
        query, key, key, key_value_seq_lengths=jnp.array([s - 1]), local_window_size=(left, 0),
        causal_alignment="bottom_right", target="h100",
    )  # fmt: skip
    assert explanation.chosen_forward == explanation.chosen_backward == "cudnn"
    text = " ".join(str(explanation).split())
    assert (ONE_DIAGONAL.name in text) is is_used
