"""The AMD side reports whatever is missing, wrong or fails in one sentence, without a crash."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import aiter
from attn_dispatch.aiter import library as aiter_library
from attn_dispatch.aiter.call import call_of
from attn_dispatch.aiter.folder import ADAPTER, AiterBuild
from attn_dispatch.aiter.kernels import Kernel
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import spec_of
from tests.support import aiter_emulated
from tests.support.aiter_cases import AITER_CASES
from tests.support.fake_aiter import code_object, shared_library

BY_NAME = {case.name: case for case in AITER_CASES}
GFX942 = parse("gfx942")
PRESENT_GFX942 = Device("rocm", "gfx942", "AMD Instinct MI300X")


@pytest.fixture
def emulator():
    with aiter_emulated.arch("gfx942") as emulator:
        yield emulator


def forward(name: str = "full", device: Device = GFX942) -> Any:
    case = BY_NAME[name]
    operands = {x: jnp.asarray(y) for x, y in case.operands().items()}
    spec = spec_of(case.forward_options(), operands)
    return jax.block_until_ready(jax.jit(lambda o: aiter.forward(spec, device, o))(operands))


def backward(name: str = "full", device: Device = GFX942) -> Any:
    case = BY_NAME[name]
    given = case.operands() | case.cotangents()
    given["out"], given["lse"] = given["out_grad"], np.zeros((case.b, case.n, case.t), np.float32)
    operands = {x: jnp.asarray(y) for x, y in given.items()}
    spec = spec_of(case.backward_options(), operands)
    return jax.block_until_ready(jax.jit(lambda o: aiter.backward(spec, device, o))(operands))


@pytest.mark.usefixtures("emulator")
class TestFailures:
    def test_an_error_of_hip_is_raised_and_the_next_call_works(self, emulator):
        emulator.fail_next("out of something")
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of something"):
            backward()
        assert len(backward()) == 3

    @pytest.mark.parametrize("answer", ["the device is busy", "gfx950"])
    def test_a_compiled_program_asks_for_the_device_again_after_an_error(self, emulator, answer):
        case = BY_NAME["causal"]
        operands = {x: jnp.asarray(y) for x, y in case.operands().items()}
        spec = spec_of(case.forward_options(), operands)
        compiled = jax.jit(lambda o: aiter.forward(spec, GFX942, o)).lower(operands).compile()
        if answer == "gfx950":
            emulator.set_arch(answer)
        else:
            emulator.fail_next(answer)
        with pytest.raises(jax.errors.JaxRuntimeError, match=answer):
            jax.block_until_ready(compiled(operands))
        emulator.set_arch("gfx942")
        jax.block_until_ready(compiled(operands))

    def test_an_error_of_aiter_is_raised(self, emulator):
        emulator.fail_next("no kernel for this")
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"AITER: .*no kernel for this"):
            forward()

    def test_attn_dispatch_poison_is_0_or_1(self, emulator, monkeypatch):
        for value, is_filled in (("", False), ("0", False), ("1", True)):
            monkeypatch.setenv("ATTN_DISPATCH_POISON", value)
            before = emulator.calls("memset")
            forward()
            assert (emulator.calls("memset") > before) == is_filled
        monkeypatch.setenv("ATTN_DISPATCH_POISON", "yes")
        expected = "AITER: ATTN_DISPATCH_POISON: expected 0 or 1, got 'yes'"
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            call_directly([jnp.zeros((2, 8, 4, 16), jnp.bfloat16)] * 3)

    def test_a_call_lowered_for_another_gpu_is_refused(self, emulator):
        emulator.set_arch("gfx950")
        expected = "lowered for gfx942 and runs on gfx950; lower it again"
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            forward("causal")

    def test_a_backward_call_without_its_asm_kernel_is_refused(self, emulator):
        emulator.set_asm_answer(0)
        with pytest.raises(jax.errors.JaxRuntimeError, match="has no ASM kernel for a backward"):
            backward("asm")
        assert emulator.calls("backward") == 0

    def test_buffers_that_contradict_each_other_are_refused(self):
        q = jnp.zeros((2, 8, 4, 16), jnp.bfloat16)
        row, group = q[0], {"max_seq_len_q": np.int64(8), "max_seq_len_kv": np.int64(8)}
        starts = jnp.zeros(3, jnp.int32)
        bias = jnp.zeros((2, 4, 8, 8), jnp.bfloat16)
        wrong: list[tuple[str, list[jax.Array], dict[str, Any]]] = [
            ("q: expected float16 or bfloat16 of 4 axes, .*got bfloat16 [4, 16]",
             [q[0, 0], q, q], {}),
            ("q: expected float16 .*got float32 [2, 8, 4, 16]", [q.astype(jnp.float32)] * 3, {}),
            ("q: expected axes of 1 to 2147483647 .*got bfloat16 [0, 8, 4, 16]", [q[:0]] * 3, {}),
            ("k: expected q's dtype, batch and head dim, .*got bfloat16 [8, 4, 16]",
             [q, q[0], q], {}),
            ("k: expected q's dtype, batch and head dim, .*got bfloat16 [1, 8, 4, 16]",
             [q, q[:1], q], {}),
            ("v: expected k's dtype and shape .*got bfloat16 [2, 7, 4, 16]", [q, q, q[:, 1:]], {}),
            ("heads of k: expected a divisor of q's 4, got 3", [q, q[:, :, :3], q[:, :, :3]], {}),
            ("head dim of v: expected a multiple of 8 up to 256, got 12", [q, q, q[..., :12]],
             {"results": [jax.ShapeDtypeStruct((2, 8, 4, 12), q.dtype)]}),
            ("seqstart_q: expected an array, got none", [row] * 3, {}),
            ("seqstart_q: expected int32 of one axis, of 2 or more, got int32 [1]",
             [row] * 3 + [starts[:1]] * 2, group),
            ("seqstart_k: expected int32 [3], got int32 [2]", [row] * 3 + [starts, starts[:2]],
             group),
            ("max_seq_len_q: expected at most 8, the rows there are, got 9",
             [row] * 3 + [starts] * 2,
             group | {"max_seq_len_q": np.int64(9),
                      "results": [jax.ShapeDtypeStruct((8, 4, 16), q.dtype)]}),
            ("expected 3 operands and 1 results, got 4 and 1", [q] * 4, {}),
            ("out: expected bfloat16 [2, 8, 4, 8], got bfloat16 [2, 8, 4, 16]",
             [q, q, q[..., :8]], {}),
            ("max_seq_len_q: expected 8, got 7", [q] * 3, {"max_seq_len_q": np.int64(7)}),
            ("bias: expected bfloat16 [2, 4, 8, 8], .*got bfloat16 [2, 8, 4, 16]", [q] * 4,
             {"bias": "bias"}),
            ("bias: expected bfloat16 [2, 4, 8, 8], .*got bfloat16 [3, 4, 8, 8]",
             [q] * 3 + [jnp.repeat(bias, 2, 0)[:3]], {"bias": "bias"}),
            ("bias: expected bfloat16 [2, 4, 8, 8], .*got bfloat16 [2, 2, 8, 8]",
             [q] * 3 + [bias[:, :2]], {"bias": "bias"}),
            ("bias: expected float32 [2, 4] of ALiBi slopes, .*got bfloat16", [q] * 4,
             {"bias": "alibi"}),
            ("bias: expected float32 [2, 4] of ALiBi slopes, .*got float32 [3, 4]",
             [q] * 3 + [jnp.zeros((3, 4))], {"bias": "alibi"}),
            ("rng_state: expected uint32 [4], got uint32 [2]",
             [q, q, q, jnp.zeros(2, jnp.uint32)], {"dropout_rate": np.float32(0.1)}),
            ("window_right: expected at most 2147483630 ",
             [q] * 3, {"mask": "top_left", "window_right": np.int64(2**31 - 1)}),
        ]  # fmt: skip
        for message, operands, changes in wrong:
            with pytest.raises(jax.errors.JaxRuntimeError, match=matching(message)):
                call_directly(operands, **changes)

    @pytest.mark.parametrize(
        ("message", "changes"),
        [
            ("max_seq_len_q: expected 1 to 2147483647, got 0", {"max_seq_len_q": np.int64(0)}),
            ("max_seq_len_kv: expected 1 to 2147483647, got", {"max_seq_len_kv": np.int64(2**31)}),
            ("scale: expected a positive normal number, got nan", {"scale": np.float32(np.nan)}),
            ("scale: expected a positive normal number, got inf", {"scale": np.float32(np.inf)}),
            ("scale: expected a positive normal number, got -0.5", {"scale": np.float32(-0.5)}),
            ("dropout_rate: expected 0 to below 1, got 1", {"dropout_rate": np.float32(1)}),
            ("dropout_rate: expected 0 to below 1, got -1e-09",
             {"dropout_rate": np.float32(-1e-9)}),
            ("dropout_rate: expected 0 to below 1, got", {"dropout_rate": np.float32(np.nan)}),
            ("logits_soft_cap: expected a finite number", {"logits_soft_cap": np.float32(np.inf)}),
            ("logits_soft_cap: expected a finite number", {"logits_soft_cap": np.float32(-1)}),
            ('mask: expected one of none, top_left, bottom_right, got "diagonal"',
             {"mask": "diagonal"}),
            ('bias: expected one of none, bias, alibi, got "junk"', {"bias": "junk"}),
            ("accumulator: expected one of split,", {"accumulator": "junk"}),
            ('generation: expected one of dev18, v0.1.15, got "v0.1"', {"generation": "v0.1"}),
            ("window_left: expected -1 to 2147483647, got -2", {"window_left": np.int64(-2)}),
            ("window_left: expected -1, except under a mask, got 3", {"window_left": np.int64(3)}),
            ("bf16_rounding: expected 0 to 2, got 3", {"bf16_rounding": np.int64(3)}),
            ("bf16_rounding: expected 0, except with use_asm, got 1",
             {"bf16_rounding": np.int64(1)}),
            ("num_splits: expected 1 to 128, got 129", {"num_splits": np.int64(129)}),
            ("num_splits: expected 1, except in a split-KV call", {"num_splits": np.int64(2)}),
            ("value_page: expected 0, except with keys in pages", {"value_page": np.int64(1)}),
            ("is_paged: expected false, except in a split-KV call, got true", {"is_paged": True}),
            ("heads_first_kv: expected false, except", {"heads_first_kv": True}),
            ("deterministic: expected false, except in a backward", {"deterministic": True}),
            ("has_dbias: expected false, except in a backward", {"has_dbias": True}),
            ('accumulator: expected "split", except in a backward', {"accumulator": "atomic_32"}),
            ("has_gaps: expected false where q has 4 axes, got true", {"has_gaps": True}),
            ("has_gaps: expected false, except without use_asm",
             {"has_gaps": True, "use_asm": True}),
            ("logits_soft_cap: expected 0, except without use_asm",
             {"logits_soft_cap": np.float32(2), "use_asm": True}),
            ('bias: expected "none", except without logits_soft_cap',
             {"logits_soft_cap": np.float32(2), "bias": "alibi"}),
        ],
    )  # fmt: skip
    def test_wrong_values_of_attributes_are_refused(self, message, changes):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call_directly([jnp.zeros((2, 8, 4, 16), jnp.bfloat16)] * 3, **changes)

    def test_all_attributes_of_wrong_type_or_name_are_listed(self):
        q = jnp.zeros((2, 8, 4, 16), jnp.bfloat16)
        changes: dict[str, Any] = {"unheard_of": True, "scale": np.int64(1), "mask": True}
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            call_directly([q] * 3, **changes)
        _, _, wrong = str(raised.value).partition("attributes of the custom call: ")
        scale, mask, unknown = wrong.split("; ")
        assert scale.startswith("scale: ") and "expected F32 but got S64" in scale
        assert mask.startswith("mask: ") and unknown == "unknown unheard_of"


def matching(message: str) -> str:
    """The message as a pattern in which only `.*` is special."""
    return ".*".join(map(re.escape, message.split(".*")))


def call_directly(operands: list[jax.Array], **changes: Any) -> Any:
    """Run the forward custom call of the case "full", with some attributes changed."""
    q = operands[0]
    case = replace(BY_NAME["full"], t=8, s=8)
    spec = spec_of(case.forward_options(needs_lse=False), case.operands())
    kernel = Kernel("ck", "ck", 0, "split", ())
    attributes = aiter._attributes(spec, call_of(spec), kernel, GFX942) | changes
    results = attributes.pop("results", [jax.ShapeDtypeStruct((2, 8, 4, 16), q.dtype)])
    call = jax.ffi.ffi_call(aiter.FORWARD_TARGET, results)
    return jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(*operands))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which AITER's build is looked for. It does not exist yet."""
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(tmp_path))
    aiter_library._load.cache_clear()
    yield tmp_path / "gfx942"
    aiter_library._load.cache_clear()


def build_record(**changes: Any) -> AiterBuild:
    build = AiterBuild("dev18", "gfx942", "0.1.7", "", "", "", "hipcc 7", False, 3, 5, "2026-11-21")
    return replace(build, **changes)


def load(error: str = "") -> aiter_library.AiterLibrary:
    return aiter_library.load(rocm_library(error), "gfx942")


def rocm_library(*errors: str) -> SimpleNamespace:
    """A stand-in for `_rocm` that fails to load AITER with each error in turn, then loads it.

    An empty error is a success.
    """
    remaining = list(errors)

    def load_aiter(path: Path, arch: str) -> None:
        if remaining and (error := remaining.pop(0)):
            raise RuntimeError(error)

    return SimpleNamespace(load_aiter=load_aiter)


def finish_build(folder: Path) -> None:
    """Put into `folder` what a finished build leaves there."""
    kernels = folder / "hsa" / "gfx942" / "fmha_v3_fwd"
    kernels.mkdir(parents=True)
    for number in range(5):
        (kernels / f"{number}.co").write_bytes(code_object("gfx942"))
    (folder / ADAPTER).write_bytes(shared_library())
    build_record().write(folder)


def test_a_build_that_failed_to_load_is_tried_again(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "attn_dispatch._rocm", rocm_library("out of memory"))
    assert "AITER is not built for gfx942" in aiter_library.find("gfx942").unusable_reason
    finish_build(folder)
    assert aiter_library.find("gfx942").unusable_reason == "out of memory"
    found = aiter_library.find("gfx942")
    assert found.is_usable
    (folder / ADAPTER).unlink()
    assert aiter_library.find("gfx942") is found


def test_a_rocm_library_that_failed_to_import_is_tried_again(folder, monkeypatch):
    answers = [rocm_library(), ImportError("cannot allocate memory in static TLS block")]

    def load(native: Any) -> Any:
        if isinstance(answer := answers.pop(), ImportError):
            raise answer
        return answer

    monkeypatch.setattr(aiter_library.native_libraries, "load", load)
    finish_build(folder)
    assert "static TLS" in aiter_library.find("gfx942").unusable_reason
    assert aiter_library.find("gfx942").is_usable


class TestMissing:
    def test_a_missing_rocm_library_makes_aiter_unusable(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "attn_dispatch._rocm", None)
        library = aiter_library.find("gfx942")
        assert not library.is_usable
        assert "reinstall it with ATTN_DISPATCH_ROCM=1" in library.unusable_reason

    def test_a_missing_build_makes_aiter_unusable(self, folder):
        assert "run `attn-dispatch build-aiter --arch gfx942`" in load().unusable_reason

    def test_a_build_without_rocm_makes_aiter_unusable(self, folder):
        folder.mkdir()
        build_record(compile_check_only=True).write(folder)
        assert "built without ROCm" in load().unusable_reason

    def test_a_missing_library_of_the_build_makes_aiter_unusable(self, folder):
        folder.mkdir()
        build_record().write(folder)
        assert f"library is missing, or no file: {folder / ADAPTER}; run" in load().unusable_reason
        os.mkfifo(folder / ADAPTER)
        assert "library is missing, or no file" in load().unusable_reason

    def test_a_build_for_another_architecture_makes_aiter_unusable(self, folder):
        folder.mkdir()
        build_record(arch="gfx950").write(folder)
        assert (
            f"{folder} has AITER 'dev18' for 'gfx950': run `attn-dispatch" in load().unusable_reason
        )

    def test_a_missing_folder_of_asm_kernels_makes_aiter_unusable(self, folder):
        folder.mkdir()
        (folder / ADAPTER).write_bytes(shared_library())
        build_record().write(folder)
        assert "AITER's ASM kernels are missing from" in load().unusable_reason
        assert "build-aiter" in load().unusable_reason

    def test_a_missing_asm_kernel_makes_aiter_unusable(self, folder):
        kernels = folder / "hsa" / "gfx942" / "fmha_v3_fwd" / "MI300"
        kernels.mkdir(parents=True)
        (folder / ADAPTER).write_bytes(shared_library())
        build_record().write(folder)
        for number in range(5):
            expected = f"{kernels.parents[1]} has {number} of AITER's 5 ASM kernels: run `attn-"
            assert load().unusable_reason.startswith(expected)
            (kernels / f"{number}.co").write_bytes(code_object("gfx942"))
        before = dict(os.environ)
        assert load().is_usable and load().path == str(folder / ADAPTER)
        assert dict(os.environ) == before
        assert load("AITER is too old").unusable_reason == "AITER is too old"

    def test_a_missing_library_is_a_reason_only_if_the_device_is_present(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "attn_dispatch._rocm", None)
        case = BY_NAME["asm"]
        spec = spec_of(case.forward_options(), case.operands())
        (reason,) = aiter.not_supported_reasons(spec, PRESENT_GFX942)
        assert "ATTN_DISPATCH_ROCM=1" in str(reason)
        assert aiter.not_supported_reasons(spec, GFX942) == ()
        with pytest.raises(RuntimeError, match="ATTN_DISPATCH_ROCM=1"):
            attn_dispatch.register_aiter_calls("gfx942")

    def test_a_gpu_without_kernels_has_one_reason(self):
        case = BY_NAME["asm"]
        spec = spec_of(case.forward_options(), case.operands())
        radeon = Device("rocm", "gfx1100", "Radeon", is_present=False)
        (reason,) = aiter.not_supported_reasons(spec, radeon)
        expected = "AITER's attention kernels run on gfx942 and gfx950, and this is gfx1100"
        assert str(reason) == expected
