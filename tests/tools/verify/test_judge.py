"""The conformance suite on wrong implementations: each is noticed by the case recorded for it.

mutate_judge.py found the cases among drawn ones and recorded them in judged.json;
`python -m tests.scripts.mutate_judge --write` finds them again.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attn_dispatch.core import select
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from tests.scripts.mutate_judge import RECORD, failures, failures_of_the_right_one
from tests.support import fused_in_numpy
from tests.wrong_implementations import WRONG

_RECORD = json.loads(RECORD.read_text())
_CASES = {name: Case.from_json(case) for name, case in _RECORD["cases"].items()}
_NOTICED_BY: dict[str, str | None] = _RECORD["noticed_by"]


def test_the_record_has_all_wrong_implementations():
    assert list(_NOTICED_BY) == list(WRONG), "python -m tests.scripts.mutate_judge --write"


def test_no_wrong_implementation_survives():
    assert [name for name, case in _NOTICED_BY.items() if case is None] == []


@pytest.mark.parametrize("case", _CASES.values(), ids=str)
def test_the_right_implementation_passes(case: Case):
    assert failures_of_the_right_one(case) == ()


@pytest.mark.parametrize(("name", "case"), [x for x in _NOTICED_BY.items() if x[1]])
def test_the_wrong_implementation_is_noticed(name: str, case: str):
    # `failures` also asserts that the mistake was made at all.
    assert WRONG[name].applies_to(_CASES[case])
    assert failures(WRONG[name], _CASES[case])


def test_a_wrong_implementation_is_removed_after_an_error():
    wrong, before = WRONG["layout/out_with_heads_first"], select.IMPLEMENTATIONS
    with pytest.raises(RuntimeError), wrong.installed():
        assert select.IMPLEMENTATIONS == (*before, wrong)
        raise RuntimeError
    assert before == select.IMPLEMENTATIONS


def test_the_judge_accepts_a_correct_fused_kernel():
    shorter = replace(draws.KERNELS, lengths=(1, 2, 33, 64, 100))
    cases = draws.examples(75, 20261122, shorter) + draws.examples(25, seed=20261122)
    wrong = {case.name: fused_in_numpy.failures(case) for case in cases}
    assert not any(wrong.values()), {name: x for name, x in wrong.items() if x}
