"""The conformance suite on wrong implementations: each is noticed by the case kept for it.

Which case that is was found by mutate_judge.py, among drawn ones, and is kept in judged.json;
`python tests/mutate_judge.py --write` finds them anew.
"""

from __future__ import annotations

import json

import pytest

from attn_dispatch.conformance.case import Case
from attn_dispatch.core import select
from mutate_judge import RECORD, failures, failures_of_the_right_one
from wrong_implementations import WRONG

_RECORD = json.loads(RECORD.read_text())
_CASES = {name: Case.from_json(case) for name, case in _RECORD["cases"].items()}
_NOTICED_BY: dict[str, str | None] = _RECORD["noticed_by"]

# Those that no drawn case notices, and why.
_SURVIVORS = {
    # They are noticed with other seeds: what shows them is drawn too seldom.
    "masks/band_counted_from_the_rows_start": "few packed cases have several sequences and a band",
    "masks/mask_of_the_first_batch_row": "few masks differ from batch row to batch row",
    "segments/segments_past_the_largest_are_kept": "few rows are long enough for ids past 4",
    # Never drawn.
    "segments/key_length_past_the_array_is_none": "all lengths fit the arrays",
    "scores/scale_without_its_sign": "all scales are 1 / sqrt(H)",
    "scores/scale_of_zero_is_the_default": "all scales are 1 / sqrt(H)",
    "scores/negative_scale_turns_row_max": "all scales are 1 / sqrt(H)",
    "scores/tiny_scale_is_zero": "all scales are 1 / sqrt(H)",
    "gradients/key_gradient_alone_not_scaled": "all gradients are asked for, or none",
    "gradients/value_gradient_alone_is_zero": "all gradients are asked for, or none",
    "rows/lse_in_float16": "small cases are in float32 and bfloat16",
    "rows/float16_overflows": "small cases are in float32 and bfloat16",
    "layout/wide_values_cut": "values are never wider than queries",
    # Not looked at: the mask is the implementation's own, judged by its rate and by whether a key
    # of which all words are different draws another.
    "dropout/only_the_first_dropout_key": "all keys are changed at once, and no case has several",
    "dropout/half_of_the_dropout_key": "all words of the key are changed at once",
    "dropout/same_dropout_in_every_batch_row": "masks of batch rows are not compared",
}


def test_the_record_has_all_wrong_implementations():
    assert list(_NOTICED_BY) == list(WRONG), "python tests/mutate_judge.py --write"


def test_survivors_are_known():
    survivors = {name for name, case in _NOTICED_BY.items() if case is None}
    assert survivors == _SURVIVORS.keys()


@pytest.mark.parametrize("case", _CASES.values(), ids=str)
def test_the_right_implementation_passes(case: Case):
    assert failures_of_the_right_one(case) == ()


@pytest.mark.parametrize(("name", "case"), [x for x in _NOTICED_BY.items() if x[1]])
def test_the_wrong_implementation_is_noticed(name: str, case: str):
    # `failures` also asserts that the mistake was made at all.
    assert WRONG[name].applies_to(_CASES[case])
    assert failures(WRONG[name], _CASES[case])


def test_nothing_is_left_of_them():
    wrong, before = WRONG["layout/out_with_heads_first"], select.IMPLEMENTATIONS
    with pytest.raises(RuntimeError), wrong.installed():
        assert select.IMPLEMENTATIONS == (*before, wrong)
        raise RuntimeError
    assert before == select.IMPLEMENTATIONS
