"""AITER's front end and handlers, end to end on the emulator, against the float64 reference."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read once, at the first call

import jax
import pytest

import aiter_emulated
from aiter_cases import CASES_BY_GFX, SIXTEEN_BIT_CASES
from aiter_check import Check, sixteen_bit_atomics
from attn_dispatch.target import parse
from cases import Case


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize(("case", "gfx"), CASES_BY_GFX, ids=str)
def test_against_reference(case: Case, gfx: str):
    with aiter_emulated.arch(gfx) as emulator:
        check = Check.of(case, parse(gfx), emulator)
        assert {"query", "key", "value"} <= set(check.expected) or case.soft_cap is not None
        assert {name: x for name, x in check.errors().items() if not x <= 1} == {}
        assert check.asked_otherwise() == []


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
