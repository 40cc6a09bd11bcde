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
from tests.support.aiter_check import Check, differences_from_expected_calls, sixteen_bit_atomics
from tests.support.extent import sample

MAX_SCORES = 40_000
"""The limit for a common case: the emulator computes scores one by one."""
SMALL_CASES = tuple(
    case
    for case in CASES
    if case.b * case.n * case.t * case.s <= MAX_SCORES
    # In an eager call the operation that gathers pages is not lowered for the emulator.
    if not (case.page and case.transform == "eager")
)


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


class OnEmulator(Conformance):
    """AITER's custom calls on this machine's CPU; every call is planned for the named GPU."""

    implementation = "aiter"
    # XLA would compute a matrix product that was planned for the GPU on this CPU.
    has_fallback = False

    def __init__(self, gfx: str) -> None:
        self.device = parse(gfx)

    @contextmanager
    def lowering(self) -> Iterator[None]:
        with mock.patch.object(primitive, "device_for", lambda platform: self.device):
            yield


@pytest.mark.usefixtures("without_rewrites")
@pytest.mark.parametrize(("case", "gfx"), CASES_BY_GFX, ids=str)
def test_cases_of_aiter_agree_with_the_reference(case: Case, gfx: str):
    with aiter_emulated.arch(gfx) as emulator:
        outcome = OnEmulator(gfx).check(case)
        assert (outcome.status, outcome.failures) == ("passed", ())
        if case.soft_cap is None and not case.inference:
            assert {"query", "key", "value"} <= outcome.errors.keys()
        chosen = Check.chosen_for(case, parse(gfx), needs_lse=not case.inference)
        assert differences_from_expected_calls(case, chosen, emulator) == []


@pytest.mark.parametrize("case", sample(SMALL_CASES, 4), ids=str)
def test_common_cases_agree_with_the_reference(case: Case):
    with aiter_emulated.arch("gfx942"):
        outcome = OnEmulator("gfx942").check(case)
        assert outcome.failures == ()
        if outcome.reasons:
            pytest.skip("; ".join(outcome.reasons))


def test_drawn_serving_calls_agree_with_the_reference():
    """The calls have a cache or pages, mostly of a size that split-KV kernels take."""
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
            if case.b * case.n * case.t * case.s > MAX_SCORES:
                continue
            before = emulator.calls("split_kv")
            outcome = OnEmulator("gfx942").check(case)
            assert outcome.failures == (), case.to_json()
            ran.append(emulator.calls("split_kv") - before)
    assert sum(x > 0 for x in ran) >= 20


def test_drawn_calls_agree_with_the_reference_after_each_rewrite():
    """A rewrite is applied whether or not AITER needs it."""
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


def test_aiter_runs_most_of_the_common_cases():
    """A rule that refused too many calls would otherwise go unnoticed."""
    with aiter_emulated.arch("gfx942"):
        suite = OnEmulator("gfx942")
        refused = [x for x in SMALL_CASES if suite.refuses(x)]
    assert len(refused) < len(SMALL_CASES) / 2


@pytest.mark.parametrize(("case", "gfx"), SIXTEEN_BIT_CASES, ids=str)
def test_sixteen_bit_atomics_agree_with_the_reference(case: Case, gfx: str):
    """The front end never chooses them; this checks the third layout of dq_acc."""
    with aiter_emulated.arch(gfx) as emulator, sixteen_bit_atomics():
        check = Check.of(case, parse(gfx), emulator)
        assert check.chosen["backward"][1].accumulator == "atomic_16"
        assert {name: x for name, x in check.errors().items() if not x <= 1} == {}


def test_the_cases_cover_every_kind_of_kernel():
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
