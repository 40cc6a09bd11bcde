"""Real models' calls run by the recorded implementations, and each rewrite has a call or case."""

from __future__ import annotations

import json

import pytest

from attn_dispatch.core.eligibility import reasons_and_chain
from attn_dispatch.core.rewrites import REWRITES, Rewrite
from attn_dispatch.core.select import named
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.each_rewrite import calls_of
from tests.scripts.models_table import DOCUMENT, runs, table
from tests.scripts.models_table import RECORD as RECORD_FILE
from tests.support.backend import needs_cudnn
from tests.support.extent import sample
from tests.support.model_calls import MODEL_CALLS, ModelCall
from tests.support.page_tables import with_table
from tests.support.rewrite_cases import REWRITE_CASES

RECORD = json.loads(RECORD_FILE.read_text())

# cuDNN plans a call in a second or two, so that one in four is planned here.
PLANNED = sample(MODEL_CALLS, 4)
TARGETS = (("aiter", "gfx942"), ("cudnn", "sm90"), ("cudnn", "sm80"))


def found(call: ModelCall, target: str) -> list[list[str]]:
    return [[x.implementation, *x.rewrites] for x in runs(call, target)]


def test_the_page_shows_what_is_recorded_of_all_calls():
    assert len(MODEL_CALLS) == len(set(map(str, MODEL_CALLS))) == len(RECORD["calls"]) == 48
    assert DOCUMENT.read_text() == with_table(DOCUMENT, "models_table", table(RECORD["calls"]))


@pytest.mark.parametrize("call", MODEL_CALLS, ids=str)
def test_an_mi300x_runs_what_is_recorded(call: ModelCall):
    assert RECORD["calls"][str(call)]["gfx942"] == found(call, "gfx942")


@needs_cudnn
@pytest.mark.parametrize("call", PLANNED, ids=str)
def test_an_h100_runs_what_is_recorded(call: ModelCall):
    assert RECORD["calls"][str(call)]["sm90"] == found(call, "sm90")


@needs_cudnn
@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda x: x.name)
def test_each_rewrite_has_a_model_call_or_a_named_case(rewrite: Rewrite):
    if rewrite.name in RECORD["rewrites"]:
        assert not rewrite.needed_for, "a model call takes it"
        return
    case = (BY_NAME | REWRITE_CASES)[rewrite.needed_for]
    assert any(
        rewrite in (x for x, _ in chain.steps)
        for implementation, target in TARGETS
        for spec in calls_of(case)
        for reasons, chain in [reasons_and_chain(named(implementation), spec, parse(target))]
        if not reasons
    )
