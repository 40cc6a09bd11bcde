"""Randomly drawn calls with any combination of options, in the conformance suite on XLA."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib

import numpy as np
import pytest

from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import CASES
from attn_dispatch_tools.verify.seeded_random import SeededRandom
from attn_dispatch_tools.verify.suite import Conformance
from tests.support.extent import number_of_draws
from tests.support.repository import environment


class OnXla(Conformance):
    implementation = "xla"


SEED = 20261122
PARTS = 10  # so that several processes share them
COUNT = number_of_draws(150)


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_calls_pass_the_suite(part: int):
    """A failure names its case, whose name draws the same call on every machine."""
    suite, failed = OnXla(), {}
    for case in draws.examples(COUNT, SEED, draws.SMALL)[part::PARTS]:
        outcome = suite.check(case)
        if (outcome.status, outcome.failures) != ("passed", ()):
            failed[case.name] = outcome
    assert failed == {}


def test_same_seed_draws_the_same_cases():
    first = draws.examples(30, seed=5)
    assert len(first) == len({case.name for case in first}) == 30
    assert draws.examples(30, seed=5) == first
    assert draws.examples(60, seed=5)[:30] == first
    assert draws.examples(30, seed=6) != first
    for case in first:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_shapes_are_known_without_drawing_arrays():
    """Large arrays take long to draw, so their shapes must be known beforehand."""
    small = [case for case in CASES if case.b * case.n * case.t * case.s <= 2**16]
    for case in (*draws.examples(150, 3, draws.SMALL), *small):
        drawn = {name: (x.shape, x.dtype) for name, x in case.operands().items()}
        assert list(drawn) == list(case.operand_names) == list(case.avals())
        assert drawn == {name: (x.shape, x.dtype) for name, x in case.avals().items()}


def digest(count: int = 40) -> str:
    """A digest of drawn calls and their arrays."""
    cases = draws.examples(count, seed=7, sizes=draws.SMALL)
    text = json.dumps([case.to_json() for case in cases], sort_keys=True)
    arrays = [x for case in cases for x in (case.operands() | case.cotangents()).values()]
    sums = [zlib.crc32(np.ascontiguousarray(x).tobytes()) for x in arrays]
    return f"{zlib.crc32(text.encode()):08x} {zlib.crc32(str(sums).encode()):08x}"


DIGEST = "ac46c35b 14d4e363"


def test_draws_are_the_same_in_every_process_and_version():
    """A report names a seed but no versions, so the drawn calls must never change."""
    code = "from tests.xla import test_draws; print(test_draws.digest())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONHASHSEED="3"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest() == DIGEST


def test_seeded_random_is_uniform():
    rng = SeededRandom("fair")
    rolls = [rng.between(1, 6) for _ in range(6000)]
    assert {*rolls} == {*range(1, 7)}
    assert all(900 < rolls.count(x) < 1100 for x in range(1, 7))
    subsets = {rng.some_of("abc") for _ in range(200)}
    assert len(subsets) == 7 and () not in subsets


def drawn(*, sizes: draws.Sizes = draws.KERNELS) -> list[Case]:
    return [case for seed in range(4) for case in draws.examples(250, seed, sizes)]


def test_every_option_is_drawn():
    """No option is so rare that a thousand cases lack it."""
    cases = drawn()
    facts = [
        "mask", "bias", "alibi", "sinks", "soft_cap", "dropout", "lse_grad", "needs_max",
        "deterministic", "inference", "q_lengths", "kv_lengths", "q_segments", "cu_q",
        "max_segments", "score_shift", "dead_rows", "infinite_bias", "is_causal", "wanted",
        "mixed_poison", "dropout_keys",
    ]  # fmt: skip
    assert [name for name in facts if len({getattr(case, name) for case in cases}) < 2] == []
    assert {case.transform for case in cases} == {*draws._TRANSFORMS}


def layout(case: Case) -> str:
    names = {"lengths": case.q_lengths or case.kv_lengths, "packed": case.q_segments}
    names["ragged"] = case.cu_q
    return next((name for name, given in names.items() if given), "plain")


def test_every_option_occurs_with_every_layout_and_transform():
    options = {
        "scale 0": lambda c: c.scale == 0,
        "scale below 0": lambda c: c.scale < 0,
        "scale tiny": lambda c: 0 < c.scale < 1e-3,
        "scale large": lambda c: c.scale > 1,
        "value narrower": lambda c: c.v < c.h,
        "value wider": lambda c: c.v > c.h,
        "one query": lambda c: c.t == 1,
        "one key": lambda c: c.s == 1,
        "window": lambda c: c.window != (None, None),
        "bottom right": lambda c: c.alignment == "bottom_right",
        "alibi": lambda c: c.alibi,
        "sinks": lambda c: c.sinks,
        "soft cap": lambda c: c.soft_cap,
        "dropout": lambda c: c.dropout,
        "gradient of lse": lambda c: c.lse_grad,
        "some gradients": lambda c: c.wanted,
        "forward alone": lambda c: c.inference,
        "deterministic": lambda c: c.deterministic,
    }
    pairs = {
        (name, place)
        for case in drawn()
        for name, has in options.items()
        if has(case)
        for place in (layout(case), case.transform)
    }
    places = ("plain", "lengths", "packed", "ragged", *draws._TRANSFORMS)
    assert {(name, place) for name in options for place in places} - pairs == set()


def test_value_dims_vary_around_every_head_dim():
    cases = drawn()
    for h in draws.KERNELS.head_dims:
        dims = [case.v for case in cases if case.h == h]
        assert min(dims) < h <= max(dims) and (h >= 256 or max(dims) > h), h
