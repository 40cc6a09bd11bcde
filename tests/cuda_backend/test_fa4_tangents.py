"""The handler of compiled FlashAttention-4's tangents: what it launches, and what it refuses.

Kernels trust their arguments. Some arrays here are described and have no memory: a pass that the
checks accept fails at the driver, which refuses it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from attn_dispatch.fa4.compiled import TANGENT_TARGET
from tests.support import fa4_arrays
from tests.support.fa4_arrays import Array, Pass
from tests.support.fa4_emulated import Emulated, needs_computing_kernels
from tests.support.fa4_wrong_arrays import wrong_arrays

SET, WITHOUT = "sm90_d64_bfloat16", "sm90_d96_float16"
SHAPE = (2, 200, 150, 4, 2)
_FORMS = {"rows": None, "bits": 1, "bits by head": SHAPE[3]}
"""The forms of a mask, with the number of its heads."""


def made(fa4: Emulated, shape=SHAPE, name: str = SET, **mask: Any) -> Pass:
    (kernels,) = [x for x in fa4.library.sets if x.name == name]
    return fa4_arrays.tangent(kernels, shape, **mask)


def run(call: Pass, **changed: object) -> list[jax.Array]:
    """The results of a call of zeros; None as an attribute leaves it out."""
    tile_m, tile_n = call.kernels.tangent_tiles
    attributes = {
        "set": call.kernels.name, "mask": "bits" if call.has_bits else "rows",
        "tile_m": np.int64(tile_m), "tile_n": np.int64(tile_n), "scale": np.float32(0.125),
    } | changed  # fmt: skip
    return fa4_arrays.called_with_zeros(TANGENT_TARGET, call, attributes)


def outcome(fa4: Emulated, call: Pass) -> tuple[str, str]:
    """The kind of failure and its message; ("accepted", "") if the checks passed."""
    fa4.driver.fail("cuLaunchKernelEx")
    arrays = ([x.described for x in y.values()] for y in (call.operands, call.results))
    code, message = fa4.module.tangent(call.kernels.name, call.has_bits, *arrays)
    fa4.driver.fail("")
    return ("accepted", "") if code == "device" else (code, message)


@pytest.mark.parametrize("form", _FORMS)
def test_a_tangent_is_one_launch_and_fills_nothing(fa4, form: str):
    run(made(fa4, mask_heads=_FORMS[form]))
    lines = [x for x in fa4.driver.lines() if x.startswith(("launch", "fill"))]
    assert len(lines) == 1 and lines[0].startswith("launch")
    assert ("tangent_bits" if "bits" in form else "tangent") in lines[0]


@needs_computing_kernels
def test_poison_fills_the_results_and_none_is_left(fa4, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
    call = made(fa4)
    results = run(call)
    filled = [x for x in fa4.driver.lines() if x.startswith("fill")]
    assert filled == [f"fill {x.described[3]} with 255" for x in call.results.values()]
    assert all((x == 0).all() for x in results)


def test_a_refused_launch_is_an_error_and_the_next_call_runs(fa4):
    run(made(fa4))
    fa4.driver.fail("cuLaunchKernelEx")
    sentence = "attn_dispatch FlashAttention-4: launching a kernel: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4))
    run(made(fa4))


def test_a_set_without_tangents_says_so(fa4):
    kernels = made(fa4).kernels
    without = replace(made(fa4), kernels=replace(kernels, name=WITHOUT))
    sentence = f"the kernels {WITHOUT} compute no tangents"
    assert outcome(fa4, without) == ("unsupported", sentence)
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(without, tile_m=np.int64(0), tile_n=np.int64(0))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"set": "sm90_d80_bfloat16"}, 'has no kernels "sm90_d80_bfloat16"; build them'),
        ({"causal": True}, "causal"),
        ({"mask": "ranges"}, "mask: expected rows or bits, got .ranges."),
        ({"mask": None}, "mask"),
        ({"tile_m": np.int64(128)}, "for tiles of 128 x 64, and the kernels .* tiles of 64 x 64"),
        ({"tile_n": None}, "tile_n"),
        ({"scale": np.float32("nan")}, "scale: expected a finite number, got nan"),
        ({"scale": None}, "scale"),
    ],
)
def test_wrong_attributes_are_refused(fa4, changed: dict, sentence: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4), **changed)
    assert fa4.driver.lines() == []


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize(
    "shape", [SHAPE, (1, 1, 1, 4, 1), (2, 129, 1, 4, 4), (1, 1 << 20, 64, 4, 2)]
)
def test_right_arrays_are_accepted(fa4, shape, form: str):
    for masks in {1, shape[0]}:
        call = made(fa4, shape, masks=masks, mask_heads=_FORMS[form])
        assert outcome(fa4, call) == ("accepted", "")


@pytest.mark.parametrize("form", _FORMS)
def test_an_array_that_is_wrong_in_one_fact_is_refused(fa4, form: str):
    call = made(fa4, mask_heads=_FORMS[form])
    assert len(call.operands) == 13
    for name in (*call.operands, *call.results):
        for array in wrong_arrays(name, call[name], SHAPE[0], SHAPE[3]):
            code, message = outcome(fa4, call.changed(**{name: array}))
            assert code == "wrong call", (name, array, code, message)
            assert re.fullmatch(r"[\w ',]+: expected .+, got .+", message), (array, message)


@pytest.mark.parametrize("which", ["operands", "results"])
def test_missing_and_further_arrays_are_refused(fa4, which: str):
    call = made(fa4)
    right: dict[str, Array] = getattr(call, which)
    for count in (*range(len(right)), len(right) + 1):
        names = [*right.items(), ("another", call["query"])]
        code, message = outcome(fa4, replace(call, **{which: dict(names[:count])}))
        expected = f"{which}: expected {len(right)}, got {count}"
        assert (code, message) == ("wrong call", expected)
