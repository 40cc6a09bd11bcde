"""docs/models.md shows the implementations that are chosen, and each rewrite has a call or case."""

from __future__ import annotations

import re

import pytest

from attn_dispatch.core.eligibility import reasons_and_chain
from attn_dispatch.core.rewrites import REWRITES, Rewrite
from attn_dispatch.core.select import named
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.each_rewrite import calls_of
from tests.scripts.models_table import DOCUMENT, SHOWN, arguments_list, row, runs
from tests.support.backend import needs_cudnn
from tests.support.extent import sample
from tests.support.model_calls import MODEL_CALLS, ModelCall
from tests.support.rewrite_cases import REWRITE_CASES

PAGE = DOCUMENT.read_text()
NUMBERS = [x[1] for x in re.finditer(r"^\d+\. (.*) \([\w, ]+\)$", PAGE, re.MULTILINE)]
"""The rewrites of model calls, in the order of their numbers on the page."""

# cuDNN plans a call in a second or two, so that one in four is planned here.
PLANNED = sample(MODEL_CALLS, 4)
TARGETS = (("aiter", "gfx942"), ("cudnn", "sm90"), ("cudnn", "sm80"))


def row_of(call: ModelCall) -> list[str]:
    first, _, _ = PAGE.partition("\n## ")
    (line,) = (x for x in first.splitlines() if x.startswith(f"| {call.model} | {call.what} |"))
    return line.split(" | ")


def shown(call: ModelCall, target: str) -> list[str]:
    """The cells of a call on the page, for a target."""
    first = 2 + 2 * list(SHOWN).index(target)
    return [x.removesuffix(" |") for x in row_of(call)[first : first + 2]]


def found(call: ModelCall, target: str) -> list[str]:
    line = row(call, dict.fromkeys(SHOWN, runs(call, target)), NUMBERS)
    return [x.removesuffix(" |") for x in line.split(" | ")[2:4]]


def test_the_page_has_all_calls_with_their_shapes_and_arguments():
    assert len(MODEL_CALLS) == len(set(map(str, MODEL_CALLS))) == 48
    assert all(row_of(call) for call in MODEL_CALLS)
    assert "\n".join(arguments_list()) in PAGE


@pytest.mark.parametrize("call", MODEL_CALLS, ids=str)
def test_the_page_shows_what_an_mi300x_runs(call: ModelCall):
    assert shown(call, "gfx942") == found(call, "gfx942")


@needs_cudnn
@pytest.mark.parametrize("call", PLANNED, ids=str)
def test_the_page_shows_what_an_h100_runs(call: ModelCall):
    assert shown(call, "sm90") == found(call, "sm90")


@needs_cudnn
@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda x: x.name)
def test_each_rewrite_has_a_model_call_or_a_named_case(rewrite: Rewrite):
    if rewrite.name in NUMBERS:
        assert not rewrite.needed_for, "a model call takes it"
        return
    assert f"- {rewrite.name}: `{rewrite.needed_for}`" in PAGE
    case = (BY_NAME | REWRITE_CASES)[rewrite.needed_for]
    assert any(
        rewrite in (x for x, _ in chain.steps)
        for implementation, target in TARGETS
        for spec in calls_of(case)
        for reasons, chain in [reasons_and_chain(named(implementation), spec, parse(target))]
        if not reasons
    )
