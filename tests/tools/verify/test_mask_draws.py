"""Drawn calls with masks: what is drawn, and that the suite and XLA agree on them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_masks import DENSE, FORMULAS, OTHERS, RANGES, DrawnMaskMod
from attn_dispatch_tools.verify.mask_draws import mask_examples
from attn_dispatch_tools.verify.reference import allowed, arrays_of, places_of
from attn_dispatch_tools.verify.suite import Conformance


class OnXla(Conformance):
    implementation = "xla"


def small(count: int, seed: int = 5) -> list[Case]:
    return mask_examples(count, seed, draws.SMALL)


@pytest.mark.parametrize("part", range(4))
def test_drawn_masks_pass_the_suite(part: int):
    suite, failed = OnXla(), {}
    for case in small(48)[part::4]:
        outcome = suite.check(case)
        if (outcome.status, outcome.failures) != ("passed", ()):
            failed[case.name] = outcome
    assert failed == {}


def test_same_seed_draws_the_same_cases():
    first = mask_examples(30, 5)
    assert len({case.name for case in first}) == 30
    assert mask_examples(60, 5)[:30] == first and mask_examples(30, 6) != first
    for case in first:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_shapes_are_known_without_drawing_arrays():
    for case in small(150):
        drawn = {name: (x.shape, x.dtype) for name, x in case.operands().items()}
        assert list(drawn) == list(case.operand_names) == list(case.avals())
        assert drawn == {name: (x.shape, x.dtype) for name, x in case.avals().items()}


def test_every_mask_is_drawn_with_every_layout():
    cases = [x for seed in range(3) for x in mask_examples(250, seed)]
    assert {x.mask_mod[0] for x in cases if x.mask_mod} == {*RANGES, *OTHERS}
    assert {x.mask_kind for x in cases if x.mask} == {"", *DENSE}
    assert any(x.mask and x.mask[1] > 1 for x in cases), "no dense mask differs by head"
    for has in (lambda x: x.cu_q, lambda x: x.q_segments, lambda x: x.kv_lengths):
        found = {"ranges" if x.mask_mod[0] in RANGES else "others"
                 for x in cases if x.mask_mod and has(x)}  # fmt: skip
        assert found == {"ranges", "others"}
    assert any(x.mask_mod is None and x.mask is None for x in cases)
    for name in ("lse_grad", "inference", "sinks", "mixed_poison", "own_arrays", "dead_rows"):
        assert len({getattr(x, name) for x in cases}) > 1, name


def test_some_queries_see_nothing_and_some_see_all():
    sees = [allowed(x.forward_options(), x.operands()) for x in small(120) if x.mask_mod]
    counts = [x.sum(axis=3) for x in sees]
    assert sum((x == 0).any() and (x > 0).any() for x in counts) > 20
    assert sum((x == y.shape[3]).any() for x, y in zip(counts, sees, strict=True)) > 10


def runs(case: Case) -> np.ndarray:
    """The number of ranges of keys that the mask_mod alone leaves to each query."""
    options, operands = case.forward_options(), case.operands()
    mod = options.meaning.mask_mod
    assert isinstance(mod, DrawnMaskMod)
    places = places_of(options, operands, 0)
    sees = np.broadcast_to(
        mod.may_attend(places, arrays_of("mask_mod", operands)), (case.n, case.t, case.s)
    )
    before = np.pad(sees, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    return (sees & ~before).sum(axis=2)


@pytest.mark.parametrize("formula", RANGES)
def test_ranges_have_at_most_two_of_them(formula: str):
    for seed in range(3):
        case = Case(f"ranges/{seed}", t=40, s=50, mask_mod=(formula, 7))
        assert runs(case).max() <= 2


def test_two_ranges_are_drawn_and_bits_have_more():
    assert runs(Case("two", t=40, s=50, mask_mod=("two ranges by t", 7))).max() == 2
    for formula in ("bits[t, s]", "same image", "s == t or (t - s) % w == 0"):
        assert runs(Case("more", t=90, s=90, mask_mod=(formula, 7))).max() >= 1
    assert runs(Case("bits", t=40, s=50, mask_mod=("bits[t, s]", 7))).max() > 2


@pytest.mark.parametrize("formula", ["two ranges by n and t", "t - s < w + 8 n", "blocks[n, t, s]"])
def test_some_masks_differ_by_head(formula: str):
    case = Case("heads", t=90, s=90, mask_mod=(formula, 7))
    sees = allowed(case.forward_options(), case.operands())
    assert (sees != sees[:, :1]).any()


def test_all_formulas_are_in_one_table():
    assert {*RANGES, *OTHERS} <= {*FORMULAS} and not RANGES.keys() & OTHERS.keys()
