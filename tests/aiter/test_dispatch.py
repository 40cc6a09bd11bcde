"""The tables of aiter/rules.py against AITER's own dispatch, compiled from its wheel.

AITER is asked through the adapter, on a HIP runtime that only writes down what it should launch.
"""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.aiter import buffers as aiter_buffers
from attn_dispatch.aiter import sizes
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Kernel, kernel_for, not_supported_reasons
from attn_dispatch.aiter.rules import ASM_RULES, CK, CK_RULES, DISPATCH, SPLIT_RULES
from attn_dispatch.aiter.sizes import splits_of
from tests.support.aiter_judge import api, build, grid
from tests.support.aiter_judge.calls import struct_of

pytestmark = pytest.mark.skipif(
    isinstance(build.tools(), str), reason=str(build.tools()).replace("\n", " ")
)
ARCHS = pytest.mark.parametrize("arch", build.ARCHS)

CAUSAL = {"mask": "bottom_right", "window_right": 0}


@pytest.fixture(scope="module")
def libraries() -> tuple[api.Library, api.Library]:
    judge, capture = build.build()
    return api.Library(judge), api.Library(capture)


@pytest.fixture
def judge(libraries: tuple[api.Library, api.Library]) -> Any:
    """judge.so as a GPU of the arch that it is called with."""

    def on(arch: str) -> api.Library:
        libraries[0].set_hip_version(7)
        for gfx in build.ARCHS:
            libraries[0].set_asm_folder(gfx, build.asm_folder(gfx))
        libraries[0].set_gpu(arch)
        return libraries[0]

    return on


@ARCHS
def test_asm_runs_what_the_table_says(judge: Any, arch: str):
    """Every row of AITER's own is exactly so, and every other row is stricter by intent."""
    library, counts = judge(arch), {"asm": 0, "refused": 0, "stricter": 0}
    for call in grid.calls():
        rows = [rule for rule in ASM_RULES if rule.is_broken_by(call, arch)]
        takes = library.takes_asm(struct_of(call, use_asm=True, accumulator=_atomic_32(call)))
        assert takes == all(rule.source != DISPATCH for rule in rows), (call, rows)
        counts["stricter" if takes and rows else "asm" if takes else "refused"] += 1
        if not not_supported_reasons(call, arch):
            kernel = kernel_for(call, arch)
            assert (kernel.family == "asm") == (not rows), call
            assert kernel.why_not_asm == tuple(rule.reason(call) for rule in rows)
    assert sum(counts.values()) >= 2000
    assert min(counts.values()) >= 100, counts


@ARCHS
def test_the_asm_kernel_is_the_one_named(judge: Any, arch: str):
    library, launched = judge(arch), 0
    for call, kernel in _supported(arch, "asm"):
        struct = struct_of(call, use_asm=True, accumulator=kernel.accumulator)
        failed, records = library.run(struct)
        assert not failed, (call, failed)
        name, file = _launched(call, records)
        assert f"/hsa/{arch}/" in file
        assert f"hd{call.head_dim if call.head_dim in (64, 192) else _width(call)}_" in name, call
        assert ("bf16" if call.dtype == "bfloat16" else "fp16") in name
        assert ("causal" in name) == call.is_causal, call
        assert ("swa" in name) == (call.mask != "none" and not call.is_causal), call
        assert ("group" in name) == call.is_group, call
        assert "rtna" not in name and "rtz" not in name
        if arch == "gfx942" and call.dtype == "bfloat16":
            assert "rtne" in name
        if call.backward:
            assert "a32" in name
            if call.is_causal and (call.is_group or call.seq_len_q != call.seq_len_kv):
                assert ("_br_" in name) == (call.mask == "bottom_right"), call
        launched += 1
    assert launched >= 100


@ARCHS
def test_ck_runs_what_the_table_says(judge: Any, arch: str):
    """Whatever is supported, for ASM too, as CK stands in for it where it must."""
    library, counts = judge(arch), {"ck": 0, "refused": 0, "stricter": 0}
    for call in grid.calls():
        rows = [rule for rule in CK_RULES if rule.is_broken_by(call, arch)]
        failed, records = library.run(struct_of(call, use_asm=False))
        assert bool(failed) == any(rule.source == CK for rule in rows), (call, rows, failed)
        if failed:
            assert failed.startswith("AITER has no kernel for this call ") and not records
        else:
            _check_instance(call, arch, records)
        counts["refused" if failed else "stricter" if rows else "ck"] += 1
        assert not_supported_reasons(call, arch) == tuple(rule.reason(call) for rule in rows)
    assert sum(counts.values()) >= 2000
    assert min(counts.values()) >= 50, counts


@ARCHS
def test_tiles_of_queries_are_those_that_the_grid_is_counted_in(judge: Any, arch: str):
    """CK's forward pass has the tiles along y or z, of which there are 65,535."""
    library, tiles = judge(arch), set()
    for dims, is_group in product(grid.HEAD_DIMS, (False, True)):
        call = replace(
            grid.CALL, is_group=is_group, batch=1, num_heads=1, num_kv_heads=1, seq_len_q=2**20,
            max_seq_len_q=2**20, head_dim=dims[0], head_dim_v=dims[1],
        )  # fmt: skip
        failed, records = library.run(struct_of(call, use_asm=False))
        tiles |= set() if failed else set(re.findall(r"tile=(\d+)x", records[0]))
    assert tiles == {str(sizes.QUERIES_OF_A_TILE)}


@ARCHS
def test_split_kv_runs_what_the_table_says(judge: Any, arch: str):
    library, counts = judge(arch), {"ck": 0, "refused": 0, "stricter": 0}
    for call in grid.split_calls():
        rows = [rule for rule in SPLIT_RULES if rule.is_broken_by(call, arch)]
        splits = kernel_for(call, arch).num_splits
        failed, records = library.run(struct_of(call, use_asm=False, num_splits=splits))
        assert bool(failed) == any(rule.source == CK for rule in rows), (call, rows, failed)
        if failed:
            assert failed.startswith("AITER has no kernel for this call ") and not records
        else:
            _check_split_instance(call, records)
        counts["refused" if failed else "stricter" if rows else "ck"] += 1
        assert not_supported_reasons(call, arch) == tuple(rule.reason(call) for rule in rows)
    assert min(counts.values()) >= 200, counts


def test_splits_are_those_of_aiters_rule(tmp_path: Path):
    """Its function, which stands in a header that needs PyTorch, taken out of it and compiled."""
    found = build.tools()
    assert isinstance(found, build.Tools)
    header = (found.aiter_meta / "csrc/include/mha_common.h").read_text()
    rule = re.search(r"^inline int\s+num_splits_heuristic_ck\(.*?^\}", header, re.M | re.S)
    assert rule is not None
    source, library = tmp_path / "rule.cc", tmp_path / "rule.so"
    source.write_text(
        "#include <algorithm>\n#include <cmath>\n#include <vector>\nusing std::ceil;\n"
        + rule[0].replace("inline int", 'extern "C" int', 1)
    )
    command = [found.compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    aiters = ctypes.CDLL(str(library)).num_splits_heuristic_ck
    rng, counts = random.Random(5), set()
    for _ in range(2000):
        rows, keys = rng.choice((1, 4, 8, 65, 300)), 128 * rng.randint(1, 1024)
        shape = {"batch": rng.choice((1, 2, 3, 5, 8, 16, 40)), "num_heads": rng.randint(1, 40)}
        call = replace(
            grid.split_calls()[0], seq_len_q=rows, max_seq_len_q=rows, seq_len_kv=keys,
            max_seq_len_kv=keys, **shape,
        )  # fmt: skip
        workgroups = call.batch * call.num_heads * -(-rows // 64)
        for arch, units in (("gfx942", 304), ("gfx950", 256)):
            expected = aiters(workgroups, 2 * units, keys // 128, 128)
            assert splits_of(call, arch) == expected, call
            counts.add(expected)
    assert len(counts) > 40


@pytest.mark.parametrize("splits", [0, 129])
def test_more_splits_than_ck_combines(judge: Any, splits: int):
    """AITER would leave the output as it was."""
    struct = struct_of(grid.split_calls()[0], use_asm=False, num_splits=splits)
    failed, records = judge("gfx942").run(struct)
    assert failed.startswith("AITER's split-KV kernels take 1 to 128 splits, got ") and not records


def test_every_argument_of_split_kv_arrives(libraries: tuple[api.Library, api.Library]):
    struct = api.split_kv_struct()
    given = _fill_distinctly(struct)
    struct.num_splits, struct.logits_soft_cap = 7, 30.0
    failed, records = libraries[1].run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {_aiter_name(name): value for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "mask_type": given["mask"],
        "scale_s": "0.500000", "scale_p": "1.000000", "scale_o": "1.000000", "has_lse": "1",
        "logits_soft_cap": "30.000000", "num_splits": "7", "is_gappy": "0", "cache_batch_idx": "0",
    }  # fmt: skip
    for name in ("rng_state", "seqlen_q_ptr", "max_seqlen_k", "use_ext_asm", "how_v3_bf16_cvt",
                 "num_pages"):  # fmt: skip
        expected.pop(name)
    assert got == expected


@ARCHS
@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_every_rounding_of_bfloat16(judge: Any, arch: str, rounding: str):
    """gfx950 rounds in hardware: it has one kernel for all three."""
    call = replace(grid.CALL, **CAUSAL)
    for backward in (False, True):
        struct = struct_of(
            replace(call, backward=backward),
            use_asm=True,
            rounding=["rtne", "rtna", "rtz"].index(rounding),
            accumulator="atomic_32",
        )
        name, _ = _launched(call, judge(arch).run(struct)[1])
        assert (rounding in name) == (arch == "gfx942")


@ARCHS
def test_16_bit_atomics_run_nothing_that_32_bit_ones_do_not(judge: Any, arch: str):
    library, both = judge(arch), 0
    for call in filter(lambda call: call.backward, grid.calls()):
        if library.takes_asm(struct_of(call, use_asm=True, accumulator="atomic_16")):
            assert library.takes_asm(struct_of(call, use_asm=True, accumulator="atomic_32")), call
            both += 1
    assert both >= 20


@ARCHS
def test_rows_of_a_16_bit_accumulator_are_as_wide_as_a_head(judge: Any, arch: str):
    """128, or 192 for head dim 192: AITER has no such kernel for other head dims above 128."""
    library, dims = judge(arch), set()
    call = replace(grid.CALL, backward=True)
    for dim, length, is_group in product(range(8, 257, 8), (64, 150, 256), (False, True)):
        for dim_v, mask in product({64, 128, 192, dim}, ({}, CAUSAL)):
            lengths = dict.fromkeys(
                ("seq_len_q", "seq_len_kv", "max_seq_len_q", "max_seq_len_kv"), length
            )
            asked = replace(
                call, head_dim=dim, head_dim_v=dim_v, is_group=is_group, **lengths, **mask
            )
            if library.takes_asm(struct_of(asked, use_asm=True, accumulator="atomic_16")):
                dims.add(dim)
    assert dims == {*range(64, 129, 8)} | ({192} if arch == "gfx950" else set())


@pytest.mark.parametrize("backward", [False, True])
def test_every_argument_arrives(
    libraries: tuple[api.Library, api.Library], judge: Any, backward: bool
):
    judge("gfx950")
    capture = libraries[1]
    capture.set_asm_folder("gfx950", build.asm_folder("gfx950"))
    capture.set_gpu("gfx950")
    struct = api.backward_struct() if backward else api.forward_struct()
    given = _fill_distinctly(struct)
    failed, records = capture.run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {_aiter_name(name): str(value) for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "rand_val_ptr": "0",
        "drop_on_device": "1", "drop_seed": given["rng_state"],
        "drop_offset": str(int(given["rng_state"]) + 8), "p_drop": "0.250000",
        "cu_seqlen_q_ptr": "0", "cu_seqlen_k_ptr": "0", "stride_randval": "0",
        "nhead_stride_randval": "0", "batch_stride_randval": "0", "mask_type": given["mask"],
    }  # fmt: skip
    if backward:
        expected |= {
            "scale": "0.500000", "p_undrop": "0.750000", "has_dbias": "1", "is_store_randval": "0",
            "is_v3_atomic_fp32": "1", "seqlen_q_padded": "0", "seqlen_k_padded": "0",
        }  # fmt: skip
        for name in ("nhead_stride_lse", "batch_stride_lse"):
            expected[f"{name}d"] = expected.pop(name)
    else:
        expected |= {
            "scale_s": "0.500000", "scale_p": "1.000000", "scale_o": "1.000000", "has_lse": "1",
            "logits_soft_cap": "30.000000", "min_seqlen_q": "0", "s_randval": "0",
            "seqstart_q_padding_ptr": "0", "seqstart_k_padding_ptr": "0",
        }  # fmt: skip
        expected.pop("max_seqlen_k")  # mha_fwd has no use for it
    for name in ("rng_state", "accumulator"):
        expected.pop(name, None)
    assert got == expected


def test_without_dropout_the_seed_is_zero(libraries: tuple[api.Library, api.Library]):
    _, records = libraries[1].run(struct_of(grid.CALL, use_asm=False))
    assert {"drop_on_device 0", "drop_seed 0", "drop_offset 0", "p_drop 0.000000"} < set(records)


@ARCHS
def test_device_arch(judge: Any, arch: str):
    assert judge(arch).table.api_version == 4
    assert judge(arch).table.generation == b"dev18"
    assert judge(arch).table.arch is None  # this library has the host code of both
    assert judge(arch).device_arch() == arch
    assert judge(arch).device_arch(size=6) == "the name of the GPU needs 7 bytes, got 6"


def test_ck_stands_in_where_the_loader_has_no_kernel_for_the_gpu(judge: Any):
    library, struct = judge("gfx942"), struct_of(grid.CALL, use_asm=True)
    for units, takes in ((304, True), (80, True), (64, True), (228, False), (38, False)):
        library.set_gpu("gfx942", units)
        assert library.takes_asm(struct) == takes
    failed, (record,) = library.run(struct)
    assert not failed and record.startswith("ck ")


@pytest.mark.parametrize("version", [6, 7])
def test_an_error_of_hip_is_told(judge: Any, version: int):
    library = judge("gfx942")
    library.set_hip_version(version)
    library.set_launch_error(1)
    failed, records = library.run(struct_of(grid.CALL, use_asm=False))
    assert failed.startswith(
        'HIP reports "an error of the fake HIP" after AITER\'s launch of: bf16'
    )
    assert len(records) == 1
    assert library.last_error() == 0  # no other caller must take it for its own error
    library.run(struct_of(grid.CALL, use_asm=False))
    assert library.run(struct_of(grid.CALL, use_asm=False))[0] == ""


@pytest.mark.parametrize("version", [6, 7])
@pytest.mark.parametrize("use_asm", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_an_earlier_error_of_somebody_else(judge: Any, version: int, use_asm: bool, backward: bool):
    """HIP 7 still reports it after our launch, and CK would stop after its first kernel."""
    library = judge("gfx942")
    library.set_hip_version(version)
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=use_asm, accumulator="atomic_32" if use_asm else "split")
    expected = library.run(struct)
    assert expected[0] == "" and len(expected[1]) == (3 if backward and use_asm else 1)
    library.set_error(2)
    assert library.run(struct) == expected
    if use_asm:
        library.set_error(2)
        assert library.takes_asm(struct)
        assert library.last_error() == 0


@pytest.mark.parametrize("backward", [False, True])
def test_hip_does_not_say_which_device_is_current(judge: Any, backward: bool):
    """Then the forward pass runs by CK; either leaves no error behind."""
    library, call = judge("gfx942"), replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator=_atomic_32(call))
    for first in (0, 1, 2, 3):  # calls of hipGetDevice that succeed before one fails
        library.fail_call("hipGetDevice", first)
        failed, _ = library.run(struct)
        assert not failed or "an error of the fake HIP" in failed
        assert library.last_error() == 0
        library.fail_call("", 0)


def test_a_device_that_cannot_be_made_current_at_first(judge: Any):
    """The next call finds it."""
    library, results = judge("gfx942"), []
    struct = struct_of(grid.CALL, use_asm=True)

    def run() -> None:
        library.set_device(0)
        results.append(library.run(struct))
        library.set_device(7)  # a thread of it begins
        library.fail_call("hipSetDevice", 0)
        results.extend(library.run(struct) for _ in range(2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (first, _), (second, records), (third, _) = results
    assert (first, records, third) == ("", [], "")
    assert second == "HIP cannot make the device current: an error of the fake HIP"


@pytest.mark.parametrize("backward", [False, True])
def test_asm_without_its_files(judge: Any, backward: bool):
    library = judge("gfx942")
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator="atomic_32")
    name = "fmha_v3_bwd/" if backward else "fmha_v3_fwd/"
    for folder, missing in (("", "hsa/gfx…/"), ("/nowhere/hsa/gfx942/", "/nowhere/hsa/gfx942/")):
        library.set_asm_folder("gfx942", folder)
        failed, records = library.run(struct)
        assert f"ASM kernels are missing: there is no folder {missing}{name} beside" in failed
        assert not records


def test_the_environment_names_no_folder(judge: Any, monkeypatch: pytest.MonkeyPatch):
    """`import aiter` sets AITER_ASM_DIR to the kernels of its version, which must be ignored."""
    monkeypatch.setenv("AITER_ASM_DIR", "/nowhere/")
    _, file = _launched(grid.CALL, judge("gfx942").run(struct_of(grid.CALL, use_asm=True))[1])
    assert file.startswith(build.asm_folder("gfx942"))


@pytest.mark.parametrize("backward", [False, True])
def test_two_devices_from_one_thread(judge: Any, backward: bool):
    """AITER has its ASM kernels by thread, each on the device on which it was loaded."""
    library, results = judge("gfx950"), []
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator=_atomic_32(call))

    def run() -> None:
        for device in (3, 4, 3, 5, 4):
            library.set_device(device)
            results.append(library.run(struct))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(results) == 10
    for failed, records in results:
        assert failed == ""
        _launched(call, records)  # of no other device


def test_two_architectures_in_one_process(judge: Any):
    """Each device's calls take its architecture's kernels, whichever device is 0."""
    library, files = judge("gfx942"), []
    library.set_gpu_of(1, "gfx950")

    def run() -> None:
        for device in (0, 1, 0, 1):
            library.set_device(device)
            failed, records = library.run(struct_of(grid.CALL, use_asm=True))
            assert failed == ""
            files.append(_launched(grid.CALL, records)[1])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [re.findall(r"/hsa/(\w+)/", x)[0] for x in files] == ["gfx942", "gfx950"] * 2


def test_backward_never_changes_the_kernel_behind_its_scratch(judge: Any):
    """AITER would go on with CK, whose dq_acc is larger."""
    library, call = judge("gfx942"), replace(grid.CALL, backward=True, head_dim=256, head_dim_v=256)
    failed, records = library.run(struct_of(call, use_asm=True, accumulator="atomic_32"))
    assert failed.startswith("AITER has no ASM kernel for this call: ") and not records
    for use_asm, accumulator in ((True, "split"), (False, "atomic_32")):
        failed, records = library.run(struct_of(call, use_asm=use_asm, accumulator=accumulator))
        assert failed.startswith("dq_acc is laid out for the other") and not records


def test_packed_backward_does_not_read_device_memory(judge: Any):
    """It would crash here, where the pointer goes nowhere."""
    call = replace(grid.CALL, backward=True, is_group=True)
    for arch, told in (("gfx942", "needs seqstart_k in host memory"), ("gfx950", "")):
        struct = struct_of(call, use_asm=True, accumulator="atomic_32")
        failed, records = judge(arch).run(struct)
        assert told in failed and bool(failed) != bool(records)


def _supported(arch: str, family: str) -> Iterator[tuple[AiterCall, Kernel]]:
    for call in grid.calls():
        if not not_supported_reasons(call, arch):
            kernel = kernel_for(call, arch)
            if kernel.family == family:
                yield call, kernel


def _atomic_32(call: AiterCall) -> str:
    return "atomic_32" if call.backward else "split"


def _width(call: AiterCall) -> int:
    """The head dim of the ASM kernel that pads to it."""
    return next(dim for dim in (64, 128, 192) if call.head_dim <= dim)


def _launched(call: AiterCall, records: list[str]) -> tuple[str, str]:
    """Name and file of the one ASM kernel, with CK's kernels around it if it is a backward pass."""
    assert not [line for line in records if line.startswith("missing ")], records
    (line,) = (line for line in records if line.startswith("asm "))
    if call.backward:
        assert records == ["dot_do_o", line, "convert_dq"]
    _, name, file = line.split()
    return name, file


def _check_instance(call: AiterCall, arch: str, records: list[str]) -> None:
    """Check that the launched CK instance is made for such a call."""
    (record,) = records
    assert record.startswith("ck arch=")
    family = "gfx950" if arch == "gfx950" else "gfx9"
    expected = {
        f"arch={family}",
        f"group={str(call.is_group).lower()}",
        f"dtype=Fmha{'Bwd' if call.backward else 'Fwd'}"
        + ("Bf16" if call.dtype == "bfloat16" else "Fp16"),
        f"mask=ck_tile::SimplifiedGenericAttentionMask<{str(call.mask != 'none').lower()}>",
        "bias=ck_tile::BlockAttentionBiasEnum::"
        + {"none": "NO_BIAS", "bias": "ELEMENTWISE_BIAS", "alibi": "ALIBI"}[call.bias],
    }
    has_dropout = str(call.dropout_rate > 0).lower()
    if call.backward:
        expected |= {f"dbias={str(call.has_dbias).lower()}"}
        expected |= {f"deterministic={str(call.deterministic).lower()}"}
        assert f"dropout=ck_tile::BlockDropoutBwd<{has_dropout}," in record
    else:
        expected |= {f"lse={str(call.needs_lse).lower()}", f"dropout={has_dropout}"}
        expected |= {f"soft_cap={str(call.logits_soft_cap > 0).lower()}"}
    assert expected <= set(record.split()), (call, record)
    fields = dict(part.split("=", 1) for part in record.split() if "=" in part)
    assert call.head_dim <= int(fields["head_dim"]), (call, record)
    assert call.head_dim_v <= int(fields["head_dim_v"]), (call, record)
    if call.backward and call.deterministic and fields["convert_dq"] == "true":
        splits = -(-call.max_seq_len_kv // int(fields["key_block"]))
        assert splits <= aiter_buffers.num_splits(call), (call, record)


def _check_split_instance(call: AiterCall, records: list[str]) -> None:
    (record,) = records
    fields = dict(part.split("=", 1) for part in record.split() if "=" in part)
    expected = {
        "arch": "gfx9",
        "group": "false",
        "dtype": "FmhaFwdBf16" if call.dtype == "bfloat16" else "FmhaFwdFp16",
        "mask": f"ck_tile::SimplifiedGenericAttentionMask<{str(call.mask != 'none').lower()}>",
        "bias": "ck_tile::BlockAttentionBiasEnum::"
        + {"none": "NO_BIAS", "bias": "ELEMENTWISE_BIAS", "alibi": "ALIBI"}[call.bias],
        "soft_cap": str(call.logits_soft_cap > 0).lower(),
        "paged": str(call.page_size > 0).lower(),
    }
    assert expected.items() <= fields.items(), (call, record)
    assert max(call.head_dim, call.head_dim_v) <= int(fields["head_dim"]), (call, record)
    assert call.head_dim_v <= int(fields["head_dim_v"]), (call, record)
    # What is past a length is not read: the kernel is one that pads the keys.
    _, pads_keys, *_ = fields["pads"].split(",")
    assert pads_keys == "true", record
    # No tile of keys reaches into the next page.
    tile_of_keys = int(fields["tile"].split("x")[1])
    assert call.page_size in (0, 64) or call.page_size % tile_of_keys == 0
    assert tile_of_keys <= 128 and int(fields["tile"].split("x")[0]) <= 64


def _fill_distinctly(struct: Any) -> dict[str, str]:
    """Every field its own value, and what AITER should be given, by this project's names."""
    chosen = {"dtype": 1, "is_group": 1, "mask": 2, "bias_kind": 1, "use_asm": 1, "accumulator": 1,
              "bf16_rounding": 2, "is_deterministic": 1, "head_dim": 104,
              "head_dim_v": 104}  # fmt: skip
    floats = {"scale": 0.5, "dropout_rate": 0.25, "logits_soft_cap": 30.0}
    given: dict[str, str] = {}

    def fill(part: Any) -> None:
        for name, kind in part._fields_:
            value: Any = chosen.get(name, floats.get(name, 1000 + 16 * len(given)))
            if isinstance(getattr(part, name), ctypes.Structure):
                fill(getattr(part, name))
                continue
            setattr(part, name, value)
            given[name + "_ptr" * (kind is ctypes.c_void_p and name != "rng_state")] = str(value)

    fill(struct)
    for name in (*floats, "dtype"):
        given.pop(name, None)
    return given


def _aiter_name(name: str) -> str:
    """AITER's name for a field of aiter_api.h."""
    exact = {
        "is_group": "is_group_mode", "bias_kind": "bias", "use_asm": "use_ext_asm",
        "bf16_rounding": "how_v3_bf16_cvt", "is_deterministic": "deterministic",
        "num_heads": "nhead_q", "num_kv_heads": "nhead_k", "head_dim": "hdim_q",
        "head_dim_v": "hdim_v", "page_table_ptr": "block_table_ptr",
        "batch_stride_page_table": "batch_stride_block_table", "page_size": "page_block_size",
        "out_acc_ptr": "o_acc_ptr", "window_left": "window_size_left",
        "window_right": "window_size_right", "seq_len_q": "seqlen_q", "seq_len_kv": "seqlen_k",
        "max_seq_len_q": "max_seqlen_q", "max_seq_len_kv": "max_seqlen_k", "out_ptr": "o_ptr",
        "out_grad_ptr": "do_ptr", "softmax_d_ptr": "d_ptr",
    }  # fmt: skip
    if name in exact:
        return exact[name]
    for ours, theirs in (("_out_grad", "_do"), ("_out", "_o"), ("_out_acc", "_o_acc")):
        if "stride" in name and name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name
