"""The handlers of wide heads: what they launch and fill, and what they refuse.

Kernels trust their arguments. Some arrays here are described and have no memory: a pass that the
checks accept fails at the driver, which refuses it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.fa4.compiled import (
    FORWARD_TARGET,
    WIDE_BACKWARD_TARGET,
    WIDE_FORWARD_TARGET,
)
from tests.support import fa4_arrays
from tests.support.fa4_arrays import Array, Pass
from tests.support.fa4_emulated import Emulated, needs_computing_kernels
from tests.support.fa4_wrong_arrays import wrong_arrays

SET, WITHOUT = "sm90_d384_bfloat16", "sm90_d96_float16"
SHAPE = (2, 70, 50, 4, 2)
"""In a causal call that sees all keys, 20 of these queries see none."""


def made(
    fa4: Emulated, shape=SHAPE, name: str = SET, *, is_backward: bool = False, **facts: int
) -> Pass:
    (kernels,) = [x for x in fa4.library.sets if x.name == name]
    return fa4_arrays.wide(kernels, shape, is_backward=is_backward, **facts)


def run(call: Pass, **changed: object) -> list[jax.Array]:
    """The results of a call of zeros; None as an attribute leaves it out."""
    attributes = {
        "set": call.kernels.name, "causal": False, "keys": np.int64(call["key"].shape[1]),
        "scale": np.float32(0.125),
    } | changed  # fmt: skip
    target = WIDE_BACKWARD_TARGET if call.is_backward else WIDE_FORWARD_TARGET
    return fa4_arrays.called_with_zeros(target, call, attributes)


def outcome(
    fa4: Emulated,
    call: Pass,
    *,
    is_causal: bool = False,
    keys: int = SHAPE[2],
    unseen: int = SHAPE[1] - SHAPE[2],
) -> tuple[str, str]:
    """The kind of failure and its message; ("accepted", "") if the checks passed."""
    fills = is_causal and unseen > 0
    fa4.driver.fail("cuMemsetD8Async" if fills else "cuLaunchKernelEx")
    arrays = ([x.described for x in y.values()] for y in (call.operands, call.results))
    code, message = fa4.module.wide(call.kernels.name, is_causal, keys, call.is_backward, *arrays)
    fa4.driver.fail("")
    return ("accepted", "") if code == "device" else (code, message)


def log(fa4: Emulated) -> tuple[list[str], list[str]]:
    """The fills, and the kernels that were launched."""
    lines = fa4.driver.lines()
    launched = [x for x in lines if x.startswith("launch")]
    names = [re.findall(r"wide_\w+", x)[0] for x in launched]
    return [x for x in lines if x.startswith("fill")], names


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_pass_launches_its_kernels_and_fills_nothing(fa4, is_causal: bool, is_backward: bool):
    run(made(fa4, (2, 50, 50, 4, 2), is_backward=is_backward), causal=is_causal)
    names = ("wide_key_grads", "wide_query_grad") if is_backward else ("wide_forward",)
    assert log(fa4) == ([], [f"{x}_causal" if is_causal else x for x in names])


def test_what_the_kernels_do_not_reach_is_filled_with_zeros(fa4):
    forward, backward = (made(fa4, is_backward=x, unseen=30) for x in (False, True))
    run(forward, causal=True, keys=np.int64(40))
    filled = [f"fill {x.described[3]} with 0" for x in backward.results.values()]
    assert log(fa4)[0] == filled[:1]
    results = run(backward, causal=True, keys=np.int64(40))
    assert log(fa4)[0] == filled
    assert all((x == 0).all() for x in results)


@needs_computing_kernels
@pytest.mark.parametrize("is_backward", [False, True])
def test_poison_fills_the_results_and_none_is_left(fa4, monkeypatch, is_backward: bool):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
    call = made(fa4, is_backward=is_backward, unseen=20)
    results = run(call, causal=True)
    filled = [f"fill {x.described[3]} with 255" for x in call.results.values()]
    assert log(fa4)[0][: len(filled)] == filled
    assert not any(jnp.isnan(x).any() for x in results)


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_refused_launch_is_an_error_and_the_next_call_runs(fa4, is_backward: bool):
    call = made(fa4, is_backward=is_backward)
    run(call)
    for nth in range(1, 3 if is_backward else 2):
        fa4.driver.fail("cuLaunchKernelEx", nth)
        sentence = "attn_dispatch FlashAttention-4: launching a kernel: CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
            run(call)
        run(call)


def test_a_set_without_wide_kernels_says_so_and_one_with_them_takes_no_mask(fa4):
    sentence = f"the kernels {WITHOUT} run no calls without a mask"
    for is_backward in (False, True):
        call = made(fa4, name=WITHOUT, is_backward=is_backward)
        assert outcome(fa4, call) == ("unsupported", sentence)
    (wide,) = [x for x in fa4.library.sets if x.name == SET]
    masked = fa4_arrays.made(wide, SHAPE, is_backward=False)
    operands = [x.described for x in masked.operands.values()]
    results = [x.described for x in masked.results.values()]
    found = fa4.module.run(SET, False, False, False, operands, results)
    assert found == ("unsupported", f"the kernels {SET} take no mask")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in masked.results.values()]
    call = jax.ffi.ffi_call(FORWARD_TARGET, shapes)
    arrays = [jnp.zeros(x.shape, x.dtype) for x in masked.operands.values()]
    tiles = {"tile_m": np.int64(wide.forward_tile_m), "tile_n": np.int64(wide.forward_tile_n)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="take no mask"):
        call(*arrays, set=SET, mask="rows", sinks=False, scale=np.float32(1), **tiles)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"set": "sm90_d500_bfloat16"}, 'has no kernels "sm90_d500_bfloat16"; build them'),
        ({"causal": np.int64(1)}, "causal"),
        ({"causal": None}, "causal"),
        ({"keys": np.int32(50)}, "keys"),
        ({"keys": None}, "keys"),
        ({"keys": np.int64(0)}, "keys that queries see: expected 1 to 50, got 0"),
        ({"keys": np.int64(51)}, "keys that queries see: expected 1 to 50, got 51"),
        ({"scale": np.float32("nan")}, "scale: expected a finite number, got nan"),
        ({"mask": "rows"}, "mask"),
    ],
)
@pytest.mark.parametrize("is_backward", [False, True])
def test_wrong_attributes_are_refused(fa4, changed: dict, sentence: str, is_backward: bool):
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4, is_backward=is_backward), **changed)
    assert log(fa4) == ([], [])


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    "shape", [SHAPE, (1, 1, 1, 1, 1), (2, 129, 1, 8, 1), (1, 64, 1 << 20, 2, 2)]
)
@pytest.mark.parametrize("columns", [8, 264, 384])
def test_right_arrays_are_accepted(fa4, shape, columns: int, is_backward: bool):
    call = made(fa4, shape, is_backward=is_backward, columns=columns)
    assert outcome(fa4, call, keys=shape[2]) == ("accepted", "")
    unseen = max(shape[1] - shape[2], 0)
    call = made(fa4, shape, is_backward=is_backward, columns=columns, unseen=unseen)
    assert outcome(fa4, call, keys=shape[2], is_causal=True, unseen=unseen) == ("accepted", "")


@pytest.mark.parametrize("columns", [260, 392])
def test_head_dims_that_the_kernels_do_not_take_are_refused(fa4, columns: int):
    expected = "a multiple of 8" if columns < 384 else "1 to 384"
    assert outcome(fa4, made(fa4, columns=columns)) == (
        "wrong call", f"head dim: expected {expected}, got {columns}",
    )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "name",
    ["query", "key", "value", "out_grad", "lse2", "products", "out", "lse", "dq", "dk", "dv"],
)
def test_an_array_that_is_wrong_in_one_fact_is_refused(fa4, name: str, is_causal: bool):
    unseen = 20 if is_causal else 0
    call = made(fa4, is_backward=name not in ("out", "lse"), unseen=unseen)
    for array in wrong_arrays(name, call[name], SHAPE[0], SHAPE[3]):
        code, message = outcome(fa4, call.changed(**{name: array}), is_causal=is_causal)
        assert code == "wrong call", (array, code, message)
        assert re.fullmatch(r"[\w ',]+: expected .+, got .+", message), (array, message)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("which", ["operands", "results"])
def test_missing_and_further_arrays_are_refused(fa4, which: str, is_backward: bool):
    call = made(fa4, is_backward=is_backward)
    right: dict[str, Array] = getattr(call, which)
    for count in (*range(len(right)), len(right) + 1):
        names = [*right.items(), ("another", call["query"])]
        code, message = outcome(fa4, replace(call, **{which: dict(names[:count])}))
        expected = f"{which}: expected {len(right)}, got {count}"
        assert (code, message) == ("wrong call", expected)
