"""Instructions that need others between them, since hardware does not wait by itself."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.aiter_dispatch import build
from tests.support.cdna import generations, wait_states
from tests.support.cdna.decoder import decode, mnemonic
from tests.support.cdna.disassembler import Line
from tests.support.cdna.listings import listing, machine
from tests.support.cdna.wait_states import KNOWN, RULES, STATES_OF_BRANCH, TooSoon, too_soon
from tests.support.extent import sample

SOURCE = Path(wait_states.__file__).with_suffix(".cl")
CLANG = "clang-22"

_MULTIPLY_16 = "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[8:11]"
_MULTIPLY_32 = "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[20:35]"
PAIRS = (
    ("scalar, memory", "v_readfirstlane_b32 s9, v1", "buffer_load_dword v2, v3, s[4:7], s9 offen",
     5, 5),
    ("scalar, vector", "v_cmp_lt_i32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc", 2, 2),
    ("scalar, vector", "v_add_co_u32_e64 v0, s[8:9], v1, v2", "v_add_u32_e32 v3, s9, v4", 2, 2),
    ("vcc, v_div_fmas", "v_div_scale_f32 v0, vcc, v1, v2, v1", "v_div_fmas_f32 v3, v4, v5, v6",
     4, 4),
    ("exec, other lanes", "v_cmpx_le_u32_e64 exec, v0, v1",
     "v_mov_b32_dpp v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 5, 5),
    ("exec, matrix", "v_cmpx_le_u32_e64 exec, v40, v41", _MULTIPLY_16, 4, 4),
    ("exec, one lane", "v_cmpx_le_u32_e64 exec, v0, v1", "v_readfirstlane_b32 s4, v2", 4, 4),
    ("vector, other lanes", "v_add_f32_e32 v3, v0, v1",
     "v_mov_b32_dpp v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 2, 2),
    ("vector, swapped rows", "v_add_f32_e32 v3, v0, v1", "v_permlane16_swap_b32_e32 v2, v3", 2, 2),
    ("vector, one lane", "v_add_f32_e32 v3, v0, v1", "v_readfirstlane_b32 s4, v3", 1, 1),
    ("vector, matrix", "v_mov_b32_e32 v7, v40", _MULTIPLY_16, 2, 2),
    ("vector, matrix", "v_mov_b32_e32 v11, v40", _MULTIPLY_16, 2, 2),
    ("transcendental, vector", "v_exp_f32_e32 v0, v1", "v_add_f32_e32 v2, v0, v3", 1, 1),
    ("matrix, factor", _MULTIPLY_16, "v_mfma_f32_16x16x16_bf16 v[40:43], v[2:3], v[6:7], 0", 7, 8),
    ("matrix, factor", _MULTIPLY_32, "v_mfma_f32_16x16x16_bf16 v[40:43], v[50:51], v[8:9], 0",
     11, 12),
    ("matrix, sum", _MULTIPLY_16, "v_mfma_f32_16x16x16_bf16 v[2:5], v[40:41], v[42:43], v[2:5]",
     5, 5),
    ("matrix, sum", _MULTIPLY_16, "v_mfma_f32_16x16x16_f16 v[0:3], v[40:41], v[42:43], v[0:3]",
     5, 5),
    ("matrix, sum", _MULTIPLY_32, "v_mfma_f32_16x16x16_bf16 v[0:3], v[40:41], v[42:43], v[0:3]",
     9, 10),
    ("matrix, read", _MULTIPLY_16, "v_add_f32_e32 v40, v3, v41", 7, 8),
    ("matrix, read", _MULTIPLY_16, "ds_write_b32 v40, v3", 7, 8),
    ("matrix, read", _MULTIPLY_32, "buffer_store_dword v9, v40, s[4:7], 0 offen", 11, 12),
    ("matrix, read", _MULTIPLY_16, "v_fmac_f32_e32 v3, v40, v41", 7, 8),
    ("matrix, overwritten", _MULTIPLY_16, "v_mov_b32_e32 v2, v40", 7, 8),
    ("matrix, overwritten", _MULTIPLY_32, "ds_read_b32 v2, v40", 11, 12),
    ("sum, overwritten", _MULTIPLY_16, "v_mov_b32_e32 v9, v40", 3, 3),
    ("sum, overwritten", _MULTIPLY_32, "v_mov_b32_e32 v30, v40", 7, 7),
    ("stored, overwritten", "buffer_store_dwordx4 v[0:3], v4, s[4:7], 0 offen",
     "v_mov_b32_e32 v2, v5", 2, 2),
    ("stored, overwritten", "buffer_store_dwordx4 v[0:3], v4, s[4:7], s9 offen",
     "v_mov_b32_e32 v1, v5", 1, 1),
    ("stored, overwritten", "buffer_store_dwordx4 v[8:11], v40, s[4:7], 0 offen",
     "v_mfma_f32_16x16x16_bf16 v[8:11], v[42:43], v[44:45], v[46:49]", 2, 2),
    ("stored, overwritten", "global_store_dwordx4 v8, v[0:3], s[4:5]", "v_mov_b32_e32 v2, v5",
     2, 2),
    ("m0, load to LDS", "s_add_u32 m0, m0, s4", "buffer_load_dword v3, s[4:7], 0 offen lds", 1, 1),
)  # fmt: skip
"""A rule, two instructions, and the wait states between them on gfx942 and on gfx950."""


def _found(text: str, arch: str) -> list[TooSoon]:
    lines = listing(text)
    ops = {op: n for n, op in enumerate(sorted(set(map(mnemonic, lines))))}
    return too_soon(decode(lines, ops), ops, arch)


@pytest.mark.parametrize("arch, column", [("gfx942", 3), ("gfx950", 4)])
@pytest.mark.parametrize("pair", PAIRS, ids=[f"{n} {x[0]}" for n, x in enumerate(PAIRS)])
def test_wait_states_between_two_instructions(pair: tuple[str, str, str, int, int], arch: str,
                                              column: int):  # fmt: skip
    rule, before, after, *_ = pair
    wanted = pair[column]
    assert isinstance(wanted, int)
    for states in range(wanted):
        between = f"s_nop {states - 1}" if states else ""
        found = _found(f"{before}\n{between}\n{after}\ns_endpgm", arch)
        assert (rule, states, wanted) in [(x.rule, x.states, x.wanted) for x in found]
    between = "\n".join(["s_mov_b32 s20, 0"] * wanted)
    assert _found(f"{before}\n{between}\n{after}\ns_endpgm", arch) == []


NO_PAIRS = (
    f"{_MULTIPLY_16}\nv_mfma_f32_16x16x16_bf16 v[0:3], v[40:41], v[42:43], v[0:3]",
    f"{_MULTIPLY_16}\nv_add_f32_e32 v40, v4, v41",
    "v_exp_f32_e32 v0, v1\nv_exp_f32_e32 v2, v0",
    "buffer_store_dwordx2 v[0:1], v4, s[4:7], 0 offen\nv_mov_b32_e32 v1, v5",
    "s_mov_b32 s9, 0\nbuffer_load_dword v2, v3, s[4:7], s9 offen",
    "v_mov_b32_e32 v0, v1\nv_mov_b32_e32 v2, v0",
    "s_cmp_eq_u32 m0, s4\nbuffer_load_dword v3, s[4:7], 0 offen lds",
)


@pytest.mark.parametrize("text", NO_PAIRS)
def test_hardware_waits_by_itself(text: str):
    assert _found(f"{text}\ns_endpgm", "gfx950") == []


def test_unknown_matrix_instruction_is_refused():
    with pytest.raises(NotImplementedError, match="v_mfma_f32_16x16x4_f32"):
        _found("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, v[8:11]\ns_endpgm", "gfx942")


def test_every_rule_has_a_pair():
    assert {x.name for x in RULES} == {x[0] for x in PAIRS}


def test_paths_through_branches():
    """The shortest path counts, backwards too; `states_of_branch` says what a branch counts as."""
    text = f"""
        v_add_f32_e32 v40, v3, v41
        {_MULTIPLY_16}
        s_cbranch_scc1 65533
        s_endpgm
    """
    (found,) = _found(text, "gfx942")
    assert (found.rule, found.states) == ("matrix, read", 1)
    code, ops = decode(listing(text), machine().ops), machine().ops
    assert [x.states for x in too_soon(code, ops, "gfx942", states_of_branch=6)] == [6]
    assert too_soon(code, ops, "gfx942", states_of_branch=7) == []


def _compiled(arch: str) -> Iterator[tuple[str, list[Line]]]:
    """The names and instructions of the kernels in the source that clang compiles for a GPU."""
    done = subprocess.run(
        [CLANG, "-x", "cl", "-cl-std=CL2.0", "-Xclang", "-finclude-default-header",
         "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", f"-D{arch.upper()}", "-nogpulib", "-O2",
         "-S", "-o", "-", str(SOURCE)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    for function in done.stdout.split(".Lfunc_end"):
        if found := re.search(r"^(\w+): .*?\n(.*\ts_endpgm)$", function, re.M | re.S):
            lines = (x.partition(";")[0] for x in found[2].split("\n"))
            yield found[1], listing("\n".join(x for x in lines if not x.startswith("\t.")))


@pytest.mark.parametrize("arch", build.ARCHS)
def test_compiler_leaves_as_many_wait_states(arch: str):
    """A compiler that knows these GPUs puts in no s_nop that the rules do not ask for, and leaves
    none out."""
    try:
        kernels = dict(_compiled(arch))
    except FileNotFoundError:
        pytest.skip(f"{CLANG} is missing")
    assert len(kernels) == 10 + (arch == "gfx950")
    shortened = 0
    for name, lines in kernels.items():
        ops = {op: n for n, op in enumerate(sorted(set(map(mnemonic, lines))))}
        assert too_soon(decode(lines, ops), ops, arch) == [], name
        for n, line in enumerate(lines):
            # LLVM reads the op_sel_hi of packed instructions as one that moves their results.
            if mnemonic(line) != "s_nop" or mnemonic(lines[n - 1]).startswith("v_pk_"):
                continue
            count = int(line.text.split()[1])
            shorter = [Line(line.address, f"s_nop {count - 1}")] if count else []
            fewer = [*lines[:n], *shorter, *lines[n + 1 :]]
            assert too_soon(decode(fewer, ops), ops, arch), (name, line)
            shortened += 1
    assert shortened > 12


@pytest.mark.parametrize("arch", generations.ARCHS)
@pytest.mark.parametrize("generation", generations.GENERATIONS)
def test_wait_states_in_aiters_kernels(generation: str, arch: str):
    """A few pairs are closer than compilers leave them, in most kernels; no others are.

    docs/aiter_defects.md describes them. Branches and barriers take longer than one state.
    """
    if missing := generations.missing(generation):
        pytest.skip(missing)
    ops = machine().ops
    for path in sample(generations.code_objects(generation, arch), 9):
        _, code = machine().load(path)
        for x in too_soon(code, ops, arch, states_of_branch=STATES_OF_BRANCH):
            assert x.states >= KNOWN[arch].get(x.rule, x.wanted), (path, x)
