"""AITER's front end and handlers, end to end on the emulator, under the conformance suite."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import jax
import pytest

from attn_dispatch.core import primitive
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import CASES
from attn_dispatch_tools.verify.each_rewrite import each_rewrite
from attn_dispatch_tools.verify.suite import Conformance
from tests.support import aiter_emulated
from tests.support.aiter_cases import CASES_BY_GFX, SIXTEEN_BIT_CASES
from tests.support.aiter_check import Check, asked_otherwise, sixteen_bit_atomics

SCORES = 40_000
"""The most scores of a case of the common table: the emulator computes them one by one."""
FEW_SCORES = tuple(
    case
    for case in CASES
    if case.b * case.n * case.t * case.s <= SCORES
    # Called operation by operation, what is gathered is not lowered for the emulator.
    if not (case.page and case.transform == "eager")
)


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


class OnEmulator(Conformance):
    """AITER's custom calls on this machine's CPU; every call is planned for the named GPU."""

    implementation = "aiter"
    # In XLA's part a matrix product would be planned for that GPU as well, and computed here.
    has_fallback = False

    def __init__(self, gfx: str) -> None:
        self.device = parse(gfx)

    @contextmanager
    def lowering(self) -> Iterator[None]:
        with mock.patch.object(primitive, "device_for", lambda platform: self.device):
            yield


@pytest.mark.usefixtures("without_rewrites")
@pytest.mark.parametrize(("case", "gfx"), CASES_BY_GFX, ids=str)
def test_cases_of_aiter(case: Case, gfx: str):
    with aiter_emulated.arch(gfx) as emulator:
        outcome = OnEmulator(gfx).check(case)
        assert (outcome.status, outcome.failures) == ("passed", ())
        if case.soft_cap is None and not case.inference:
            assert {"query", "key", "value"} <= outcome.errors.keys()
        chosen = Check.chosen_for(case, parse(gfx), needs_lse=not case.inference)
        assert asked_otherwise(case, chosen, emulator) == []


@pytest.mark.parametrize("case", FEW_SCORES, ids=str)
def test_cases_of_all(case: Case):
    with aiter_emulated.arch("gfx942"):
        outcome = OnEmulator("gfx942").check(case)
        assert outcome.failures == ()
        if outcome.reasons:
            pytest.skip("; ".join(outcome.reasons))


def test_drawn_calls_of_serving():
    """Beside a cache or on pages, whose size is most often one that split-KV kernels take."""
    drawn = [
        replace(
            case, page=128, s=384, dtype="float16", shared_pages=min(case.shared_pages, 3),
            kv_lengths=tuple(x % 386 for x in case.kv_lengths),
        )
        if case.page and i % 4
        else replace(case, dtype="bfloat16")
        for i, case in enumerate(draws.examples(220, 77))
        if case.kv_lengths and case.inference and case.transform != "eager"
    ]  # fmt: skip
    ran: list[int] = []
    with aiter_emulated.arch("gfx942") as emulator:
        for case in drawn:
            if case.b * case.n * case.t * case.s > SCORES:
                continue
            before = emulator.calls("split_kv")
            outcome = OnEmulator("gfx942").check(case)
            assert outcome.failures == (), case.to_json()
            ran.append(emulator.calls("split_kv") - before)
    assert sum(x > 0 for x in ran) >= 20


def test_calls_by_way_of_each_rewrite():
    """Drawn ones; a rewrite is taken whether or not AITER needs it."""
    drawn = [
        replace(case, dtype="bfloat16")
        for case in draws.examples(30, 41, draws.SMALL)
        if not (case.score_mod or case.mask_mod) and case.transform != "eager"
    ]
    ran: set[str] = set()
    with aiter_emulated.arch("gfx942"):
        for case in each_rewrite(drawn):
            outcome = OnEmulator("gfx942").check(case)
            assert outcome.failures == (), case.to_json()
            ran.update(outcome.rewrites)
    assert len(ran) >= 8


def test_most_of_the_common_cases_run():
    """What is refused is few: a rule that refused too much would go unnoticed else."""
    with aiter_emulated.arch("gfx942"):
        suite = OnEmulator("gfx942")
        refused = [x for x in FEW_SCORES if suite.refuses(x)]
    assert len(refused) < len(FEW_SCORES) / 2


@pytest.mark.parametrize(("case", "gfx"), SIXTEEN_BIT_CASES, ids=str)
def test_sixteen_bit_atomics(case: Case, gfx: str):
    """Not chosen by the front end, so what is checked is that its third dq_acc is right."""
    with aiter_emulated.arch(gfx) as emulator, sixteen_bit_atomics():
        check = Check.of(case, parse(gfx), emulator)
        assert check.chosen["backward"][1].accumulator == "atomic_16"
        assert {name: x for name, x in check.errors().items() if not x <= 1} == {}


def test_every_kind_of_kernel_is_among_the_cases():
    kinds = set()
    for case, gfx in CASES_BY_GFX:
        if case.name.startswith(("asm", "deterministic", "full")):
            kinds |= {
                (direction, kernel.family, kernel.accumulator)
                for direction, (_, kernel) in Check.chosen_for(case, parse(gfx)).items()
            }
    assert kinds == {
        ("forward", "ck", "split"), ("forward", "asm", "split"),
        ("backward", "ck", "split"), ("backward", "asm", "atomic_32"),
    }  # fmt: skip
