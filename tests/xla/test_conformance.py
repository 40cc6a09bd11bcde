"""The conformance suite on XLA: the cases for vendor kernels, run on this CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import xla
from attn_dispatch.core import select
from attn_dispatch.xla import scores
from attn_dispatch_tools.verify import dropout_checks
from attn_dispatch_tools.verify.calls import CaseProgram, custom_calls_of, numpy_results
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME, CASES
from attn_dispatch_tools.verify.reference import allowed
from attn_dispatch_tools.verify.suite import Conformance
from tests.support.extent import EVERY_SIZE


def smallest(cases: Sequence[Case]) -> list[Case]:
    """The smallest case of each feature."""
    by_feature: dict[str, list[Case]] = {}
    for case in cases:
        by_feature.setdefault(feature_of(case), []).append(case)
    return [min(x, key=lambda case: case.t * case.s) for x in by_feature.values()]


def feature_of(case: Case) -> str:
    """The feature of a case for which XLA has separate code; other cases differ only in size.

    For a cache only two facts matter: with or without pages, one query or more. Arrays with heads
    first are transposed before anything else, independently of the options, so that one case of
    each kind of option suffices. Head dims and tiles matter to kernels alone.
    """
    name = case.name
    if name.startswith("layouts/"):
        return re.sub(r"_.*", "", name)
    if name.startswith("shapes/"):
        return re.sub(r"b?float16_|half_tile_|_?d\d+", "", name)
    if name.startswith("cache/"):
        name = re.sub(r"(?<=[/_])t(?!1(?!\d))\d+", "tmore", name)
        name = re.sub(r"(?<=[/_])page(?!0)\d+", "pages", name)
        return re.sub(r"(?<=[/_])d\d+", "d", name)
    return re.split(r"_(?=(?:f16|bf16|f32)_)", name)[0]


SIZED = re.compile(r"_(f16|bf16|f32)_d\w+_\d+x\d+|^(layouts/)?shapes[/_]|^cache/long_")


def quarter(case: Case) -> Case:
    """The case with a quarter of the queries and keys, if its size is chosen for a kernel.

    The same feature is computed in a fraction of the time.
    """
    is_long = case.s > 8192
    if not SIZED.search(case.name) or case.ragged or (min(case.t, case.s) < 64 and not is_long):
        return case
    t, s = case.t if is_long else -(-case.t // 4), -(-case.s // 4)
    changed: dict[str, Any] = {"t": t, "s": s}
    for side, short, full in (("q", t, case.t), ("kv", s, case.s)):
        lengths = getattr(case, f"{side}_lengths")
        if lengths is not None:
            changed[f"{side}_lengths"] = tuple(scaled(x, short, full) for x in lengths)
        rows = getattr(case, f"{side}_segments")
        if rows is not None:
            changed[f"{side}_segments"] = tuple(row[::4] for row in rows)
        starts = getattr(case, f"cu_{side}")
        if starts is not None:
            changed[f"cu_{side}"] = tuple(tuple(x * short // full for x in row) for row in starts)
    if case.longest is not None:
        pairs = zip(case.longest, (t, s), (case.t, case.s), strict=True)
        changed["longest"] = tuple(-(-x * short // full) for x, short, full in pairs)
    for name in ("mask", "bias"):
        shape = getattr(case, name)
        if shape is not None:
            b, n, rows, columns = shape
            changed[name] = (b, n, min(rows, t), min(columns, s))
    return replace(case, **changed)


def scaled(length: int, short: int, full: int) -> int:
    """A length up to `full`, scaled to one up to `short`; invalid lengths stay invalid."""
    if length > full:
        return short + length - full
    return length if length <= 0 else max(length * short // full, 1)


class TestXla(Conformance):
    implementation = "xla"

    @pytest.mark.parametrize(
        "case", CASES if EVERY_SIZE else [quarter(x) for x in smallest(CASES)], ids=str
    )
    def test_case_agrees_with_the_reference(self, case: Case):
        outcome = self.check(case)
        assert outcome.failures == ()
        assert outcome.status == "passed"
        assert outcome.backward == ("" if case.inference else "xla")
        results = {"out", *case.gradients}
        assert results <= outcome.errors.keys()


def test_case_names_are_unique():
    assert len(BY_NAME) == len(CASES) >= 600


def test_cases_survive_json():
    for case in CASES:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


# Each check of the suite finds a mistake that no other check would find.


def break_results(monkeypatch, direction: str, change) -> None:
    """Replace XLA's results by `change(spec, operands, results)`."""
    right = getattr(xla, direction)

    def wrong(spec, device, operands):
        return tuple(change(spec, operands, list(right(spec, device, operands))))

    monkeypatch.setattr(xla, direction, wrong)


def failures(name: str, **facts) -> str:
    suite = Conformance()
    suite.implementation = "xla"
    outcome = suite.check(replace(BY_NAME[name], **facts))
    assert outcome.status == "failed"
    return "\n".join(outcome.failures)


SMALL = "plain/causal_f16_d64_33x17"


def test_inexact_result_is_found(monkeypatch):
    break_results(
        monkeypatch, "forward", lambda spec, _, results: [results[0] * 1.01, *results[1:]]
    )
    assert failures(SMALL).startswith("out: error")


def test_inexact_gradient_is_found(monkeypatch):
    break_results(
        monkeypatch, "backward", lambda spec, _, results: [*results[:2], results[2] * 1.01]
    )
    assert failures(SMALL).startswith("value: error")


def test_noise_in_rows_without_keys_is_found(monkeypatch):
    break_results(
        monkeypatch, "backward", lambda spec, _, results: [results[0] + 1e-6, *results[1:]]
    )
    assert "zeros: query is not exactly 0" in failures("lengths/full_f16_d64_33x17")


def test_nondeterministic_results_are_found(monkeypatch):
    calls = []

    def drift(x):
        calls.append(x)
        return x + x.dtype.type(1e-4 * len(calls))

    def change(spec, _, results):
        return [*results[:2], jax.pure_callback(drift, results[2], results[2])]

    break_results(monkeypatch, "backward", change)
    assert "deterministic: value differs" in failures(SMALL, deterministic=True)


def test_leak_between_documents_is_found(monkeypatch):
    def change(spec, operands, results):
        return [results[0] + 1e-3 * jnp.nanmean(operands["query"]), *results[1:]]

    break_results(monkeypatch, "forward", change)
    found = failures("packed/gaps_bf16_d64_256x256")
    assert "documents: random values in one document changed `out`" in found


def test_different_dropout_mask_in_the_backward_pass_is_found(monkeypatch):
    right = xla.backward

    def wrong(spec, device, operands):
        return right(spec, device, dict(operands) | {"dropout_key": operands["dropout_key"] + 1})

    monkeypatch.setattr(xla, "backward", wrong)
    assert "value: error" in failures(SMALL, dropout=0.3)


def test_dropout_mask_of_the_wrong_rate_is_found(monkeypatch):
    def too_many(*args):
        return right(*args) | right(*args)[..., ::-1]

    right = scores.dropout_keep_mask
    monkeypatch.setattr(scores, "dropout_keep_mask", too_many)
    assert "dropout: dropped" in failures(SMALL, dropout=0.3)


@pytest.mark.parametrize("name", ["found/large_scores_sinks_dropout", SMALL])
def test_dropout_mask_can_be_read_from_the_output(name):
    suite, case = Conformance(), replace(BY_NAME[name], dropout=0.5)
    suite.implementation = "xla"
    operands = case.operands()
    program = CaseProgram.of(case, ("xla",), ())
    compiled = program.compile(program.trace(operands))
    seen = dropout_checks.probe(lambda given: numpy_results(compiled, given)["out"], case)(operands)
    pairs = allowed(case.forward_options(), operands)
    returned = suite._dropout(case, operands)[0](operands)
    assert np.array_equal(seen & pairs, returned & pairs)
    assert 0.4 < (seen & pairs).sum() / pairs.sum() < 0.6


def test_cancelling_sum_does_not_count_against_the_reference():
    # The gradient of sinks is a fortieth of its largest terms (drawn with seed 20261203).
    case = Case(
        name="drawn/20261203_359", t=256, s=100, k=4, h=64, v=224, dtype="bfloat16",
        is_causal=True, kv_lengths=(100, 10), mask=(1, 4, 1, 1), sinks=1, lse_grad=True,
        wanted=("query", "value", "sinks"), transform="vmap", scale=1e-30,
    )  # fmt: skip
    suite = Conformance()
    suite.implementation = "xla"
    assert suite.check(case).failures == ()


def test_every_implementation_of_a_gpu_names_its_custom_calls():
    for module in select.IMPLEMENTATIONS:
        if module.PLATFORM is not None:
            assert custom_calls_of(module.NAME).keys() == {"forward", "backward"}, module.NAME


def test_missing_custom_call_is_found(monkeypatch):
    monkeypatch.setattr(xla, "FORWARD_TARGET", "attn_dispatch_other", raising=False)
    assert "kernels: expected custom calls ['attn_dispatch_other'], got []" in failures(SMALL)


@pytest.mark.parametrize(
    ("axis", "distance", "what"),
    [(0, 2, "batch rows"), (1, 2, "heads"), (2, 4, "rows"), (3, 16, "keys")],
)
def test_repeating_dropout_mask_is_found(axis, distance, what):
    case = Case(name="mask", b=4, t=64, s=96, dropout=0.1)
    keep = np.random.default_rng(0).random((4, 4, 64, 96)) >= case.dropout
    pairs = np.ones_like(keep)
    assert dropout_checks._not_independent(case, keep, pairs) == []
    half = np.arange(keep.shape[axis]) // distance % 2 == 0
    again = np.where(half, np.arange(keep.shape[axis]), np.arange(keep.shape[axis]) - distance)
    (failure,) = dropout_checks._not_independent(case, keep.take(again, axis), pairs)
    assert failure.startswith(f"{what} {distance} apart do not drop independently")


def test_rows_known_to_share_a_random_number_are_allowed():
    case = Case(name="mask", b=4, t=64, s=96, dropout=0.5)
    rows = np.arange(64)
    keep = np.random.default_rng(0).random((4, 4, 64, 96)) >= 0.5
    keep = keep.take(rows // 8 * 8 + rows % 2, 2)
    pairs = np.ones_like(keep)
    assert dropout_checks._not_independent(case, keep, pairs, rows_per_number=4) == []
    assert "rows 2 apart" in dropout_checks._not_independent(case, keep, pairs)[0]
    keep = keep.take(rows // 16 * 16 + rows % 8, 2)
    (failure,) = dropout_checks._not_independent(case, keep, pairs, rows_per_number=4)
    assert failure.startswith("rows 8 apart")
