"""Calls too large for any memory are explained at once: no loop runs over an extent."""

from __future__ import annotations

import time
import warnings

import pytest

from attn_dispatch.call.divisors import largest_divisor
from attn_dispatch.cudnn import plan_store
from attn_dispatch_tools.cli import main

EXTENTS = (2**28, 2**40, 2**40 - 87)
"""2^40 - 87 is prime: halving never finds a divisor."""

CALLS = (
    "q=bf16[{n},128,4,64]",
    "q=bf16[{n},1,8,64] k=bf16[{n},4096,2,64]",
    "q=bf16[1,{n},4,64]",
    "q=bf16[1,128,4,64] k=bf16[1,{n},4,64]",
    "q=bf16[1,128,{n},64]",
    "q=bf16[1,128,{n},64] k=bf16[1,128,1,64]",
    "q=bf16[1,128,4,{n}]",
    "q=f32[{n},{n},1,64]",
    "q=bf16[{n},128,4,64] bias=bf16[{n},4,128,128]",
    "q=bf16[1,{n},4,64] bias=bf16[1,4,{n},{n}]",
    "q=bf16[1,{n},4,64] mask=bool[1,1,{n},{n}]",
    "q=bf16[2,1,8,64] key_pages=bf16[{n},16,2,64] value_pages=bf16[{n},16,2,64] "
    "block_tables=i32[2,{n}] key_value_seq_lengths=i32[2]",
)
OPTIONS = (
    "--causal",
    "--causal --window 1023,0",
    "--segments 8",
    "--segments {n}",
    "--lengths",
    "--alibi --sinks",
    "--dropout 0.1",
    "--soft-cap 30",
    "--deterministic",
    "--window {n},{n}",
)


@pytest.fixture(autouse=True)
def instant_planning(monkeypatch):
    """Planning returns at once: cuDNN's time does not count."""
    monkeypatch.setattr(plan_store, "plan", lambda *_: ("an engine", 0))


@pytest.mark.parametrize("target", ["h100", "b200", "mi300x", "cpu"])
@pytest.mark.parametrize("extent", EXTENTS)
def test_huge_call_is_explained_within_two_seconds(extent: int, target: str, capsys):
    lines = [(call, "") for call in CALLS]
    lines += [(call, x) for x in OPTIONS for call in (CALLS[0], CALLS[2])]
    explained = 0
    for call, options in lines:
        words = [call.format(n=extent), *options.format(n=extent).split(), "--target", target]
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                main(["explain", *words])
                explained += 1
            except SystemExit as stop:
                assert str(stop.code).startswith("error: "), words
                print(words, stop.code)
        assert time.process_time() - start < 2, words
    assert explained >= len(lines) // 2, capsys.readouterr().out


def _largest_divisor_by_definition(number: int, limit: int) -> int:
    return max(x for x in range(1, number + 1) if number % x == 0 and (x <= limit or x == 1))


def test_largest_divisor_agrees_with_its_definition():
    for number in range(1, 300):
        for limit in (*range(0, 40), number // 2, number - 1, number, number + 1):
            assert largest_divisor(number, limit) == _largest_divisor_by_definition(number, limit)


@pytest.mark.parametrize(
    ("number", "limit", "divisor"),
    [
        (2**40, 2**25, 2**25),
        (2**40 - 87, 2**25, 1),
        (2**62, 2**25 - 1, 2**24),
        (2**61 - 1, 2**25, 1),
        (3**30, 12_345_678, 3**14),
        ((2**31 - 1) * 1009, 2**25, 1009),
        ((2**20 - 3) * (2**20 - 5), 2**25, 2**20 - 3),
    ],
)
def test_largest_divisor_of_huge_numbers(number: int, limit: int, divisor: int):
    assert largest_divisor(number, limit) == divisor
