"""The handlers of compiled FlashAttention-4 under JAX on this CPU: what they load, fill and launch.

A fake driver writes it down. The kernels compute nothing here but what the stand-ins do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import BACKWARD_TARGET, FORWARD_TARGET
from tests.support import fa4_arrays
from tests.support.fa4_arrays import Pass
from tests.support.fa4_emulated import Emulated, needs_computing_kernels
from tests.support.fake_aiter import shared_library

SET, UNLOADED = "sm90_d64_bfloat16", "sm90_d64_float16"
LATE = "sm90_d192_128_bfloat16"
GROUPED, ALONE = (2, 200, 150, 4, 2), (2, 200, 150, 2, 2)


def made(
    fa4: Emulated,
    is_backward: bool,
    shape=GROUPED,
    name: str = SET,
    mask_heads: int | None = None,
    has_sinks: bool = False,
) -> Pass:
    (kernels,) = [x for x in fa4.library.sets if x.name == name]
    return fa4_arrays.made(
        kernels, shape, is_backward=is_backward, mask_heads=mask_heads, has_sinks=has_sinks
    )


def run(call: Pass, **changed: object) -> Sequence[jax.Array]:
    """The results of a pass whose operands are zeros: no row sees anything.

    Args:
      call: its arrays.
      changed: attributes of the custom call in place of the right ones; None leaves one out.
    """
    # Compiled anew each time: XLA calls instantiate once for each program.
    return jax.block_until_ready(jax.jit(lambda: called(call, **changed))())


def called(call: Pass, **changed: object) -> Sequence[jax.Array]:
    kernels = call.kernels
    tiles = kernels.backward_tiles if call.is_backward else kernels.forward_tiles
    attributes = {"set": kernels.name, "mask": "bits" if call.has_bits else "rows"}
    attributes |= {"tile_m": np.int64(tiles[0]), "tile_n": np.int64(tiles[1])}
    attributes |= {"scale": np.float32(0.125)}
    attributes |= {} if call.is_backward else {"sinks": call.has_sinks}
    attributes = {x: y for x, y in (attributes | changed).items() if y is not None}
    target = BACKWARD_TARGET if call.is_backward else FORWARD_TARGET
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.results.values()]
    operands = [jnp.zeros(x.shape, x.dtype) for x in call.operands.values()]
    return jax.ffi.ffi_call(target, results)(*operands, **attributes)


def launches(lines: Sequence[str]) -> list[str]:
    """The names of the stand-ins that were launched."""
    return [x.rpartition(f"{SET}_")[2] for x in lines if x.startswith("launch")]


_FILL = r"fill (\d+) with (\d+)"


def fills(lines: Sequence[str]) -> list[tuple[int, int]]:
    found = (re.fullmatch(_FILL, x) for x in lines)
    return [(int(x[1]), int(x[2])) for x in found if x]


@needs_computing_kernels
@pytest.mark.parametrize(("mask_heads", "name"), [(None, "forward"), (1, "forward_bits")])
def test_a_forward_pass_is_one_launch(fa4, mask_heads, name: str):
    for has_sinks, ending in ((False, ""), (True, "_sinks")):
        run(made(fa4, False, mask_heads=mask_heads, has_sinks=has_sinks))
        assert launches(fa4.driver.lines()) == [name + ending]


@needs_computing_kernels
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (ALONE, ["preprocess", "backward", "query_grad"]),
        (
            GROUPED,
            ["preprocess", "backward_grouped", "query_grad", "key_value_grad", "key_value_grad"],
        ),
    ],
)
def test_a_backward_pass_launches_its_kernels_in_order(fa4, shape, expected: list[str]):
    run(made(fa4, True, shape))
    assert launches(fa4.driver.lines()) == expected
    by_bits = [x.replace("backward", "backward_bits") for x in expected]
    for mask_heads in (1, shape[3]):
        run(made(fa4, True, shape, mask_heads=mask_heads))
        assert launches(fa4.driver.lines()) == by_bits


@needs_computing_kernels
def test_kernels_of_the_other_form_of_mask_are_not_loaded(fa4):
    """No other test uses this set by bits, so nothing of them is loaded yet."""
    run(made(fa4, False, (2, 200, 150, 2, 2), LATE, mask_heads=1))
    lines = fa4.driver.lines()
    assert len([x for x in lines if x.startswith("set ")]) == 1
    assert next(x for x in lines if x.startswith("launch")).endswith(f"{LATE}_forward_bits")


def test_a_kernel_is_loaded_once(fa4):
    lines = []
    for _ in range(2):
        fa4.driver.lines()
        for is_backward in (False, True):
            run(made(fa4, is_backward))
        lines = fa4.driver.lines()
    assert lines and not [x for x in lines if x.startswith(("load", "set"))]


@pytest.mark.parametrize("shape", [ALONE, GROUPED])
def test_only_sums_of_grouped_heads_are_filled_and_before_the_kernels(fa4, monkeypatch, shape):
    monkeypatch.delenv("ATTN_DISPATCH_POISON", raising=False)  # the GPU suite's conftest sets it
    call = made(fa4, True, shape)
    run(call)
    lines = fa4.driver.lines()
    sums = [y.described[3] for x, y in call.results.items() if x in ("key_sums", "value_sums")]
    assert fills(lines) == [(x, 0) for x in sums]
    kinds = [x.split()[0] for x in lines]
    assert kinds == sorted(kinds, key=["load", "set", "fill", "launch"].index)


@pytest.mark.parametrize("is_backward", [False, True])
def test_poison_fills_results_and_scratch_with_nan(fa4, monkeypatch, is_backward: bool):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
    call = made(fa4, is_backward, ALONE)
    run(call)
    expected = [(x.described[3], 255) for x in call.results.values()]
    assert fills(fa4.driver.lines()) == expected


@needs_computing_kernels
@pytest.mark.parametrize("shape", [ALONE, GROUPED])
def test_no_poison_is_left_in_a_result(fa4, monkeypatch, shape):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
    for has_sinks in (False, True):
        out, lse = run(made(fa4, False, shape, has_sinks=has_sinks))
        assert (out == 0).all() and (lse == -jnp.inf).all()
    for gradient in run(made(fa4, True, shape))[:3]:
        assert (gradient == 0).all()


def test_a_wrong_value_of_the_poison_setting_is_an_error(fa4, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "perhaps")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ATTN_DISPATCH_POISON.*perhaps"):
        run(made(fa4, False))


# Failures of the driver.


@pytest.mark.parametrize(
    ("is_backward", "shape", "call"),
    [(False, GROUPED, 1), *((True, GROUPED, x) for x in range(1, 6)),
     *((True, ALONE, x) for x in range(1, 4))],
)  # fmt: skip
def test_a_refused_launch_is_an_error_and_the_next_call_runs(fa4, is_backward, shape, call: int):
    run(made(fa4, is_backward, shape))
    fa4.driver.lines()
    fa4.driver.fail("cuLaunchKernelEx", call)
    sentence = "attn_dispatch FlashAttention-4: launching a kernel: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4, is_backward, shape))
    assert len([x for x in fa4.driver.lines() if x.startswith("launch")]) == call
    run(made(fa4, is_backward, shape))


@pytest.mark.parametrize("call", [1, 2])
def test_a_refused_fill_is_an_error(fa4, call: int):
    fa4.driver.fail("cuMemsetD8Async", call)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="FlashAttention-4: cuMemsetD8Async failed"
    ):
        run(made(fa4, True))
    assert "launch" not in " ".join(fa4.driver.lines())


def test_a_kernel_that_cannot_be_loaded_is_loaded_by_a_later_call(fa4):
    """No other test uses this set, so nothing of it is loaded yet."""
    call = made(fa4, False, name=UNLOADED)
    for function, what in (
        ("cuLibraryLoadData", "loading a kernel"),
        ("cuLibraryGetKernel", "preparing a kernel"),
        ("cuKernelSetAttribute", "preparing a kernel"),
    ):
        fa4.driver.fail(function)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{what}: CUDA_ERROR_OUT_OF_MEMORY"):
            run(call)
        assert "launch" not in " ".join(fa4.driver.lines())
    run(call)
    lines = " ".join(fa4.driver.lines())
    assert "load" not in lines and "set " in lines and "launch " in lines


# What a program says about its call.


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"set": "sm90_d80_bfloat16"},
            'has no kernels "sm90_d80_bfloat16"; build them with `attn-',
        ),
        (
            {"tile_m": np.int64(128)},
            r"lowered for tiles of 128 x 128, and the kernels .* 192 x 128",
        ),
        ({"tile_n": np.int64(-1)}, r"lowered for tiles of 192 x -1, and the kernels .* 192 x 128"),
        ({"tile_n": np.int32(128)}, "tile_n"),
        ({"mask": "words"}, 'mask: expected rows or bits, got "?words"?'),
        ({"mask": None}, "mask"),
        ({"scale": np.float32("nan")}, "scale: expected a finite number, got nan"),
        ({"scale": np.float32("inf")}, "scale: expected a finite number, got inf"),
        ({"scale": np.float64(1)}, "scale"),
        ({"scale": None}, "scale"),
        ({"sinks": np.int64(1)}, "sinks"),
        ({"sinks": None}, "sinks"),
        ({"colour": np.int64(1)}, "colour"),
    ],
)
def test_wrong_attributes_are_refused(fa4, changed: dict, sentence: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4, False), **changed)
    assert fa4.driver.lines() == []


def test_a_mask_of_another_form_than_the_attribute_says_is_refused(fa4):
    sentence = r"bits: expected uint32 \[1, 4, 200, 5\], got int32 \[1, 200, 4\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4, False), mask="bits")
    sentence = r"rows: expected int32 \[1, 200, 4\], got uint32 \[1, 1, 200, 5\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(made(fa4, False, mask_heads=1), mask="rows")
    assert "launch" not in " ".join(fa4.driver.lines())


def test_sinks_that_the_attribute_does_not_say_are_refused(fa4):
    for has_sinks, counts in ((True, "expected 8, got 9"), (False, "expected 9, got 8")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"operands: {counts}"):
            run(made(fa4, False, has_sinks=has_sinks), sinks=not has_sinks)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"unknown .*sinks"):
        run(made(fa4, True), sinks=False)
    assert "launch" not in " ".join(fa4.driver.lines())


def test_tiles_of_the_other_pass_are_refused(fa4):
    (tiles,) = (x.forward_tiles for x in fa4.library.sets if x.name == SET)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"tiles of 192 x 128, .* 128 x 128;"):
        run(made(fa4, True), tile_m=np.int64(tiles[0]), tile_n=np.int64(tiles[1]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint32", "uint8"])
def test_xlas_dtypes_reach_the_checks(fa4, dtype: str):
    call = made(fa4, False)
    wrong = call.changed(value=call["value"].changed(dtype=dtype))
    got = "another type" if dtype == "uint8" else dtype
    sentence = rf"value: expected bfloat16 \[2, 150, 2, 64\], got {got} \[2, 150, 2, 64\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        run(wrong)
    assert "launch" not in " ".join(fa4.driver.lines())


def test_xla_may_capture_both_passes_in_command_buffers(fa4):
    """Loading is a stage of its own for that: it must not happen inside a capture."""
    for stages in fa4.module.fa4_handlers().values():
        assert fa4.module.traits(stages["execute"]) == fa4.module.COMMAND_BUFFERS
        assert set(stages) == {"instantiate", "initialize", "execute"}


@needs_computing_kernels
def test_calls_of_one_program_have_a_state_each(fa4):
    """Each keeps its own set of kernels."""
    names = {f"{x.name}_forward" for x in fa4.library.sets if x.name != UNLOADED and not x.is_wide}
    calls = [made(fa4, False, name=x.removesuffix("_forward")) for x in names]
    jax.block_until_ready(jax.jit(lambda: [called(x) for x in calls])())
    lines = [x for x in fa4.driver.lines() if x.startswith("launch")]
    assert {x.rpartition(" of ")[2] for x in lines} == names


def test_a_second_library_is_not_loaded(fa4, tmp_path):
    """The first success is final."""
    other = tmp_path / "other.so"
    other.write_bytes(shared_library())
    again = compiled.load(fa4.module, other)
    assert again.path == fa4.library.path and again.sets == fa4.library.sets
