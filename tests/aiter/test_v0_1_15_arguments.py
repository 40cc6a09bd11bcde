"""Every argument of a call reaches AITER v0.1.15 and later, by its name and with its value.

The adapter is compiled against stand-ins of AITER's headers, so this needs none of its sources.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.aiter_dispatch import api, grid
from tests.support.aiter_dispatch.arguments import aiter_name, fill_distinctly
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.aiter_dispatch.launches import ARCHS
from tests.support.aiter_v0_1_15 import build
from tests.support.aiter_v0_1_15.library import capture

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())

UNSET = """
rand_val_ptr stride_randval nhead_stride_randval batch_stride_randval sink_ptr v3_api_check
""".split()
"""The fields that stay 0: AITER's ASM kernels do not read them."""
UNSET_OF = {
    False: """qscale_type has_sink q_descale_ptr k_descale_ptr v_descale_ptr sink_size s_randval
        block_scale_seqstart_q_ptr block_scale_seqstart_k_ptr min_seqlen_q block_scale_size_q
        block_scale_size_kv""".split(),
    True: "is_store_randval d_sink_ptr has_pinned".split(),
}  # fmt: skip
OURS_ALONE = ("rng_state", "accumulator", "dq_acc_ptr", "dq_acc_bytes", "split_stride_dq_acc",
              "stride_dq_acc", "nhead_stride_dq_acc", "batch_stride_dq_acc", "seqlen_q_ptr",
              "seqlen_k_ptr")  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_every_argument_reaches_aiter(backward: bool):
    full = api.backward_struct() if backward else api.forward_struct()
    given = fill_distinctly(full)
    full.call.seqlen_q = full.call.seqlen_k = None
    if not backward:
        full.logits_soft_cap = 0  # the adapter refuses it
    failed, records = capture("gfx942").run(full, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {_name(name, backward): value for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "can_throw": "1",
        "drop_on_device": "1", "drop_seed": given["rng_state"], "mask_type": given["mask"],
        "drop_offset": str(int(given["rng_state"]) + 8), "p_drop": "0.250000",
        "seqlen_q_ptr": "0", "seqlen_k_ptr": "0",
    }  # fmt: skip
    expected |= dict.fromkeys((*UNSET, *UNSET_OF[backward]), "0")
    if backward:
        expected |= {"scale": "0.500000", "p_undrop": "0.750000", "has_dbias": "1",
                     "has_dropout": "1", "scratch": given["dq_acc_ptr"],
                     "v3_atomic_fp32": "1"}  # fmt: skip
        for name in ("nhead_stride_lse", "batch_stride_lse"):
            expected[f"{name}d"] = expected.pop(name)
    else:
        expected |= {"scale_s": "0.500000", "has_lse": "1", "logits_soft_cap": "0.000000"}
        # Workgroups are launched for the longest sequence.
        expected["seqlen_q"] = expected["max_seqlen_q"]
        expected.pop("max_seqlen_k")  # mha_fwd has no use for it
    for name in OURS_ALONE:
        if name not in ("seqlen_q_ptr", "seqlen_k_ptr"):
            expected.pop(name, None)
    assert got == expected


def test_a_batch_of_rows_keeps_its_number_of_queries():
    call = replace(grid.CALL, seq_len_q=300, max_seq_len_q=300)
    _, records = capture("gfx942").run(struct_of(call, use_asm=True, generation="v0.1.15"))
    assert {"seqlen_q 300", "max_seqlen_q 300", "cu_seqlen_q_ptr 0"} < set(records)


@pytest.mark.parametrize("keys, is_group, mask", [(300, False, 1), (301, False, 2), (300, True, 2)])
def test_the_diagonal_of_equal_lengths_is_the_top_left_one(keys: int, is_group: bool, mask: int):
    """gfx950's kernel of the other one writes beyond the last key."""
    call = replace(
        grid.CALL, backward=True, is_group=is_group, mask="bottom_right", window_right=0,
        seq_len_q=300, max_seq_len_q=300, seq_len_kv=keys, max_seq_len_kv=keys,
    )  # fmt: skip
    struct = struct_of(call, use_asm=True, accumulator="atomic_32", generation="v0.1.15")
    _, records = capture("gfx950").run(struct)
    assert f"mask_type {mask}" in records


@ARCHS
def test_aiter_is_asked_whether_it_takes_a_call(arch):
    for backward in (False, True):
        call = replace(grid.CALL, backward=backward)
        given = struct_of(call, use_asm=True, accumulator="atomic_32", generation="v0.1.15")
        assert capture(arch).takes_asm(given)
        assert not capture(arch).take_records()


def test_a_later_call_does_not_throw_into_other_code():
    """AITER's switch is on only while the adapter calls it."""
    library = capture("gfx942")
    can_throw = ctypes.CDLL(str(build.capture("gfx942"))).capture_can_throw
    given = struct_of(
        replace(grid.CALL, backward=True),
        use_asm=True,
        accumulator="atomic_32",
        generation="v0.1.15",
    )
    for scratch, sentence in ((given.dq_acc_bytes, ""), (0, "bytes of scratch")):
        given.dq_acc_bytes = scratch
        failed, records = library.run(given)
        assert sentence in failed and bool(failed) == bool(sentence)
        assert "can_throw 1" in records and not can_throw()
    assert library.takes_asm(given) and not can_throw()


@pytest.mark.skipif(bool(build.missing_sources()), reason=build.missing_sources())
@pytest.mark.parametrize("header", build.HEADERS)
def test_a_stand_in_has_the_fields_of_aiters_header(header: str, tmp_path: Path):
    """By name, type, order, offset and size."""
    fields = _fields((build.STAND_IN / header).read_text())
    aiter = build.sources()
    assert aiter is not None
    assert _fields((aiter / "csrc" / "include" / header).read_text()) == fields
    assert len(fields) > 70
    build.dispatch("gfx942")  # copies AITER's headers
    names = [name for _, name in fields]
    layouts = [_layout(header, names, x, tmp_path) for x in (build.STAND_IN, build.INCLUDE)]
    assert layouts[0] == layouts[1]


def _fields(text: str) -> list[tuple[str, str]]:
    """The type and name of each field of the struct mha_*_args."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(r"struct mha_\w+_args\s*\{(.*?)\n\s*\};", text, re.DOTALL)
    assert found
    parts = [" ".join(re.sub(r"=\s*\w+|\{\}", "", x).split()) for x in found[1].split(";")]
    pairs = [re.fullmatch(r"(.*[ *>])(\w+)", x) for x in parts if x]
    return [(re.sub(r"\s", "", x[1]), x[2]) for x in pairs if x]


def _layout(header: str, names: list[str], include: Path, folder: Path) -> list[str]:
    """The size of the struct and the offsets of its fields, as numbers in assembly."""
    struct = f"aiter::{header.removesuffix('.h')}_args"
    numbers = [f"sizeof({struct})", *(f"offsetof({struct}, {x})" for x in names)]
    source, assembly = folder / "layout.cc", folder / "layout.s"
    source.write_text(
        f'#include "{header}"\n#include <cstddef>\n'
        f'extern "C" const std::size_t layout[] = {{{", ".join(numbers)}}};\n'
    )
    compiler = build.compiler()
    assert compiler is not None
    flags = ("-std=c++20", "-w", "-O1", "-DENABLE_CK=0", "-D__HIP_PLATFORM_AMD__=1")
    includes = (f"-I{include}", f"-I{build.HERE}")
    command = [compiler, *flags, *includes, "-S", str(source), "-o", str(assembly)]
    subprocess.run(command, check=True)
    after = assembly.read_text().split("\nlayout:")[1]
    found = re.match(r"(?:\s+\.(?:quad|zero)\s+\d+)+", after)
    assert found
    lines = found[0].split("\n")[1:]
    assert len(lines) > len(names)
    return lines


def _name(name: str, backward: bool) -> str:
    exact = {"use_asm": "use_asm_v3", "is_deterministic": "is_deterministic",
             "bf16_rounding": "v3_bf16_cvt" if backward else "how_v3_bf16_cvt"}  # fmt: skip
    return exact.get(name) or aiter_name(name)
