"""The tables of aiter/rules.py against AITER's own dispatch, compiled from its wheel.

AITER is called through the adapter, on a fake HIP runtime that only records launches.
"""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.aiter import arrays as aiter_arrays
from attn_dispatch.aiter import sizes
from attn_dispatch.aiter.asm_rules import rules_of
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Kernel, kernel_for, not_supported_reasons
from attn_dispatch.aiter.release import DEV18
from attn_dispatch.aiter.rules import CK, CK_RULES, DISPATCH, SPLIT_RULES
from attn_dispatch.aiter.sizes import splits_of
from tests.support.aiter_dispatch import build, grid
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.aiter_dispatch.launches import ARCHS, atomic_32, launched

pytestmark = pytest.mark.skipif(
    isinstance(build.tools(), str), reason=str(build.tools()).replace("\n", " ")
)


CAUSAL = {"mask": "bottom_right", "window_right": 0}


@ARCHS
def test_asm_takes_the_calls_that_its_rules_allow(aiter_on: Any, arch: str):
    """Rules of AITER's dispatch agree exactly; every other rule is stricter on purpose."""
    library, counts = aiter_on(arch), {"asm": 0, "refused": 0, "stricter": 0}
    for call in grid.calls():
        rows = [rule for rule in rules_of(DEV18) if rule.is_broken_by(call, arch)]
        takes = library.takes_asm(struct_of(call, use_asm=True, accumulator=atomic_32(call)))
        assert takes == all(rule.source != DISPATCH for rule in rows), (call, rows)
        counts["stricter" if takes and rows else "asm" if takes else "refused"] += 1
        if not not_supported_reasons(call, arch):
            kernel = kernel_for(call, arch)
            assert (kernel.family == "asm") == (not rows), call
            assert kernel.why_not_asm == tuple(rule.reason(call) for rule in rows)
    assert sum(counts.values()) >= 2000
    assert min(counts.values()) >= 100, counts


@ARCHS
def test_asm_launches_the_kernel_made_for_the_call(aiter_on: Any, arch: str):
    library, count = aiter_on(arch), 0
    for call, kernel in _supported(arch, "asm"):
        struct = struct_of(call, use_asm=True, accumulator=kernel.accumulator)
        failed, records = library.run(struct)
        assert not failed, (call, failed)
        name, file = launched(call, records)
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
        count += 1
    assert count >= 100


@ARCHS
def test_ck_takes_the_calls_that_its_rules_allow(aiter_on: Any, arch: str):
    """The calls include those that ASM takes, since CK stands in for it."""
    library, counts = aiter_on(arch), {"ck": 0, "refused": 0, "stricter": 0}
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
def test_tiles_of_ck_have_as_many_queries_as_the_grid_limit_assumes(aiter_on: Any, arch: str):
    """CK's forward pass puts tiles of queries along y or z of a grid, which end at 65,535."""
    library, tiles = aiter_on(arch), set()
    for dims, is_group in product(grid.HEAD_DIMS, (False, True)):
        call = replace(
            grid.CALL, is_group=is_group, batch=1, num_heads=1, num_kv_heads=1, seq_len_q=2**20,
            max_seq_len_q=2**20, head_dim=dims[0], head_dim_v=dims[1],
        )  # fmt: skip
        failed, records = library.run(struct_of(call, use_asm=False))
        tiles |= set() if failed else set(re.findall(r"tile=(\d+)x", records[0]))
    assert tiles == {str(sizes.QUERIES_OF_A_TILE)}


@ARCHS
def test_split_kv_takes_the_calls_that_its_rules_allow(aiter_on: Any, arch: str):
    library, counts = aiter_on(arch), {"ck": 0, "refused": 0, "stricter": 0}
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


def test_the_number_of_splits_is_that_of_aiters_heuristic(tmp_path: Path):
    """AITER's function is cut out of a header that needs PyTorch, and compiled."""
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
def test_a_number_of_splits_that_ck_cannot_combine_is_refused(aiter_on: Any, splits: int):
    """AITER alone would leave the output unwritten."""
    struct = struct_of(grid.split_calls()[0], use_asm=False, num_splits=splits)
    failed, records = aiter_on("gfx942").run(struct)
    assert failed.startswith("AITER's split-KV kernels take 1 to 128 splits, got ") and not records


@ARCHS
@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_each_rounding_of_bfloat16_has_a_kernel_on_gfx942(aiter_on: Any, arch: str, rounding: str):
    """gfx950 rounds in hardware and has one kernel for all three."""
    call = replace(grid.CALL, **CAUSAL)
    for backward in (False, True):
        struct = struct_of(
            replace(call, backward=backward),
            use_asm=True,
            rounding=["rtne", "rtna", "rtz"].index(rounding),
            accumulator="atomic_32",
        )
        name, _ = launched(call, aiter_on(arch).run(struct)[1])
        assert (rounding in name) == (arch == "gfx942")


@ARCHS
def test_32_bit_atomics_take_every_call_that_16_bit_ones_take(aiter_on: Any, arch: str):
    library, both = aiter_on(arch), 0
    for call in filter(lambda call: call.backward, grid.calls()):
        if library.takes_asm(struct_of(call, use_asm=True, accumulator="atomic_16")):
            assert library.takes_asm(struct_of(call, use_asm=True, accumulator="atomic_32")), call
            both += 1
    assert both >= 20


@ARCHS
def test_16_bit_atomics_take_only_head_dims_that_fill_an_accumulator_row(aiter_on: Any, arch: str):
    """A row of the accumulator has 128 columns, or 192 for head dim 192.

    AITER has no such kernel for any other head dim above 128.
    """
    library, dims = aiter_on(arch), set()
    call = replace(grid.CALL, backward=True)
    for dim, length, is_group in product(range(8, 257, 8), (64, 150, 256), (False, True)):
        for dim_v, mask in product({64, 128, 192, dim}, ({}, CAUSAL)):
            lengths = dict.fromkeys(
                ("seq_len_q", "seq_len_kv", "max_seq_len_q", "max_seq_len_kv"), length
            )
            candidate = replace(
                call, head_dim=dim, head_dim_v=dim_v, is_group=is_group, **lengths, **mask
            )
            if library.takes_asm(struct_of(candidate, use_asm=True, accumulator="atomic_16")):
                dims.add(dim)
    assert dims == {*range(64, 129, 8)} | ({192} if arch == "gfx950" else set())


def test_backward_refuses_a_kernel_that_its_scratch_is_not_made_for(aiter_on: Any):
    """AITER alone would go on with CK, whose dq_acc is larger."""
    call = replace(grid.CALL, backward=True, head_dim=256, head_dim_v=256)
    library = aiter_on("gfx942")
    failed, records = library.run(struct_of(call, use_asm=True, accumulator="atomic_32"))
    assert failed.startswith("AITER has no ASM kernel for this call: ") and not records
    for use_asm, accumulator in ((True, "split"), (False, "atomic_32")):
        failed, records = library.run(struct_of(call, use_asm=use_asm, accumulator=accumulator))
        assert failed.startswith("dq_acc is laid out for the other") and not records


def test_packed_backward_does_not_read_device_memory_on_the_host(aiter_on: Any):
    """The pointer is not valid here, so that a read would crash."""
    call = replace(grid.CALL, backward=True, is_group=True)
    for arch, message in (("gfx942", "needs seqstart_k in host memory"), ("gfx950", "")):
        struct = struct_of(call, use_asm=True, accumulator="atomic_32")
        failed, records = aiter_on(arch).run(struct)
        assert message in failed and bool(failed) != bool(records)


def _supported(arch: str, family: str) -> Iterator[tuple[AiterCall, Kernel]]:
    for call in grid.calls():
        if not not_supported_reasons(call, arch):
            kernel = kernel_for(call, arch)
            if kernel.family == family:
                yield call, kernel


def _width(call: AiterCall) -> int:
    """The head dim to which the ASM kernel pads the call."""
    return next(dim for dim in (64, 128, 192) if call.head_dim <= dim)


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
        assert splits <= aiter_arrays.num_dq_acc(call), (call, record)


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
    # The kernel pads keys, so that it reads nothing past a length.
    _, pads_keys, *_ = fields["pads"].split(",")
    assert pads_keys == "true", record
    # No tile of keys reaches into the next page.
    tile_of_keys = int(fields["tile"].split("x")[1])
    assert call.page_size in (0, 64) or call.page_size % tile_of_keys == 0
    assert tile_of_keys <= 128 and int(fields["tile"].split("x")[0]) <= 64
