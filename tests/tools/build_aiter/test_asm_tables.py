"""The tables of AITER's ASM kernels, and the kernels that they name."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch_tools.build_aiter import asm_tables
from attn_dispatch_tools.terminal.building import BuildError
from tests.support.fake_aiter_checkout import FORWARD, NO_ROWS, kernel, make_checkout, write

_TABLE = "fmha_v3_fwd/fmha_fwd.csv"


@pytest.fixture
def hsa(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "aiter") / "hsa"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_tables_hold_the_rows_of_one_architecture(hsa: Path, tmp_path: Path):
    assert asm_tables.write(hsa, "gfx942", tmp_path) == 5
    source = tmp_path / "table.cc"
    source.write_text(
        '#include "asm_fmha_v3_fwd_configs.hpp"\n'
        'extern "C" const char* file(const char* name) {\n'
        "  const auto found = cfg_fmha_fwd.find(name);\n"
        "  if (found == cfg_fmha_fwd.end()) return nullptr;\n"
        "  const auto& row = found->second;\n"
        '  const bool is_two = row.mask == 2 && row.mode == 1 && row.dtype == "bf16" &&\n'
        '                      row.arch == "gfx942" && row.ts_qo == 256;\n'
        '  return is_two ? row.co_name.c_str() : "another";\n'
        "}\n"
    )
    library = tmp_path / "table.so"
    flags = ("-std=c++20", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    file = ctypes.CDLL(str(library)).file
    file.restype = ctypes.c_char_p
    assert file(b"gfx942_ZN5aiter3twoE") == b"fmha_v3_fwd/two.co"
    assert file(b"gfx942_ZN5aiter3oneE") == b"another"
    assert file(b"gfx950_ZN5aiter3twoE") is None
    text = (tmp_path / "asm_fmha_v3_bwd_configs.hpp").read_text()
    # A table without rows is there.
    assert re.search(r"cfg_fmha_bwd_dq_shuffle = \{\s*\};", text)
    assert '"fp16", 64, 64, 0, 0, 0, 0, 0, 0, 0, 128}' in text


_LONG = "x" * 200_000
ROWS = {
    "a quote": ('knl_name=a"b', "expected the name of a kernel as knl_name, got 'a\"b'"),
    "an empty name": ("knl_name=", "expected the name of a kernel as knl_name, got ''"),
    "NUL": ("knl_name=a\0", r"as knl_name, got 'a\\x00'"),
    "a long name": (f"knl_name={_LONG}", r"as knl_name, got 'x{80}' … \(200,000 letters\)"),
    "a folder": ("co_name=../c.co", r"the name of a file \(\.co\) as co_name, got '\.\./c\.co'"),
    "dtype": ("dtype=bananas", "expected bf16, fp16 or fp8bf16 as dtype, got 'bananas'"),
    "a long number": (f"hdim_q={_LONG}", r"as hdim_q, got 'x{80}' … \(200,000 letters\)"),
    "digits": ("hdim_q=١٢٨", "as hdim_q, got '١٢٨'"),
    "beyond int": (f"hdim_q={'9' * 20}", "as hdim_q, got '9{20}'"),
    "head dim": ("hdim_v=129", "a multiple of 8 from 8 to 1024 as hdim_v, got '129'"),
    "negative": ("mask=-1", "a number from 0 to 3 as mask, got '-1'"),
    "mask": ("mask=4", "a number from 0 to 3 as mask, got '4'"),
    "mode": ("mode=2", "a number from 0 to 1 as mode, got '2'"),
    "divided by 0": ("ts_qo=0", "a number from 1 to 4096 as ts_qo, got '0'"),
    "one more": ("co_name=c.co,1", "expected 10 values, got 11"),
    "a row again": ("knl_name=_ZN5aiter3oneE", "the kernel of line 2: _ZN5aiter3oneE"),
    "same calls": ("mode=0", "the calls of line 2: bf16, 128, 128, 0, 0, 0, 256, 32"),
}


@pytest.mark.parametrize("change, message", ROWS.values(), ids=ROWS)
def test_a_row_that_means_nothing_is_refused_by_its_line(
    hsa: Path, tmp_path: Path, change: str, message: str
):
    row = dict(zip(FORWARD.split("\n")[0].split(","), "bf16,128,128,0,1,0,256,32,a,c.co".split(","),
                   strict=True))  # fmt: skip
    name, value = change.split("=")
    text = ",".join({**row, name: value}.values())
    write(hsa / "gfx942", {_TABLE: f"{FORWARD}{text}\n"})
    with pytest.raises(BuildError, match=rf"fwd/fmha_fwd\.csv, line 5: .*{message}"):
        asm_tables.write(hsa, "gfx942", tmp_path)


COLUMNS = {
    "an unknown one": ("{};class", r"ts_kv, got also '\{\};class'"),
    "one twice": ("mask", "ts_kv, got also 'mask'"),
}


@pytest.mark.parametrize("name, message", COLUMNS.values(), ids=COLUMNS)
def test_columns_that_are_not_known_are_refused(hsa: Path, tmp_path: Path, name: str, message: str):
    first, *rest = FORWARD.split("\n")
    write(hsa / "gfx942", {_TABLE: "\n".join([f"{name},{first}", *rest])})
    with pytest.raises(BuildError, match=rf"expected the columns dtype, .*{message}"):
        asm_tables.write(hsa, "gfx942", tmp_path)


def test_comments_leave_rows_as_they_are(hsa: Path, tmp_path: Path):
    first, *rest = FORWARD.split("\n")
    text = "\n".join(["\ufeff/* two", "lines */", "", f"{first} ; columns", "# none", *rest])
    asm_tables.write(hsa, "gfx942", tmp_path / "before")
    write(hsa / "gfx942", {_TABLE: text.replace("\n", "\r\n")})
    asm_tables.write(hsa, "gfx942", tmp_path / "after")
    name = "asm_fmha_v3_fwd_configs.hpp"
    assert (tmp_path / "before" / name).read_text() == (tmp_path / "after" / name).read_text()


PARTS = {
    "no forward table": (("fwd/fmha_fwd.csv",), None, r"fmha_v3_fwd has no table"),
    "one backward table": (
        tuple(f"bwd/fmha_bwd_{x}.csv" for x in ("odo", "dq_convert", "dq_shuffle")), None,
        r"bwd lacks fmha_bwd_dq_convert\.csv, fmha_bwd_dq_shuffle\.csv, fmha_bwd_odo\.csv: exp",
    ),
    "garbage": (("bwd/fmha_bwd_odo.csv",), "garbage\n\x00", r"odo\.csv is no table .* the columns"),
    "empty": (("bwd/fmha_bwd_odo.csv",), "", r"fmha_bwd_odo\.csv is no table .* the columns dtype"),
    "no rows": (("bwd/fmha_bwd_odo.csv",), NO_ROWS, r"fmha_bwd_odo\.csv names no kernel"),
    "no number": (("bwd/fmha_bwd_odo.csv",), NO_ROWS + "fp16" + 11 * "," + "a,odo.co",
                  "line 2: expected a multiple of 8 from 8 to 1024 as hdim_q, got ''"),
    "a kernel of another table": (
        ("bwd/fmha_bwd_odo.csv",),
        NO_ROWS + "fp16,64,64,0,0,0,0,0,0,0,128,_ZN5aiter6dqdkdvE,odo.co",
        r"dqdkdvE in fmha_bwd_dqdkdv\.csv and fmha_bwd_odo\.csv"),
    "a table without a name in C++": (("fwd/a b.csv",), NO_ROWS, r"got 'a b\.csv'"),
    "fewer rows": (("fwd/fmha_fwd.csv",), FORWARD.split("//")[0],
                   r"its tables lack 2 of the 4 ASM kernels there: MI300/two\.co, MI308/two\.co"),
    "a kernel": (("bwd/odo.co",), None, r"lacks 1 of the 3 ASM kernels in its tables: odo\.co"),
}  # fmt: skip


@pytest.mark.parametrize("names, text, message", PARTS.values(), ids=PARTS)
def test_a_folder_with_a_part_of_the_tables_is_refused(
    hsa: Path, tmp_path: Path, names: tuple[str, ...], text: str | None, message: str
):
    for name in names:
        path = hsa / "gfx942" / f"fmha_v3_{name}"
        path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BuildError, match=message):
        asm_tables.write(hsa, "gfx942", tmp_path)


Change = Callable[[Path], object]
_ONE = "fmha_v3_fwd/MI300/one.co"
KERNELS: dict[str, tuple[Change, str]] = {
    "none of a kind of GPU": (
        lambda x: shutil.rmtree(x / "fmha_v3_fwd/MI300"),
        r"fwd lacks 2 of the 4 ASM kernels in its tables: MI300/one\.co, MI300/two\.co",
    ),
    "one of a kind of GPU": (
        lambda x: (x / "fmha_v3_fwd/MI308/two.co").unlink(), r"lacks 1 of the 4 .*: MI308/two\.co",
    ),
    "moved": (
        lambda x: (x / _ONE).rename(x / "fmha_v3_fwd/one.co"), r"lacks 1 of the 4 .*: MI300/one\.co"
    ),
    "one more": (
        lambda x: shutil.copy(x / _ONE, x / "fmha_v3_fwd/one.co"),
        r"its tables lack 1 of the 5 ASM kernels there: one\.co",
    ),
    "a folder": (
        lambda x: ((x / _ONE).unlink(), (x / _ONE).mkdir()), r"lacks 1 of the 4 .*: MI300/one\.co"
    ),
    "a folder more": (lambda x: (x / "fmha_v3_fwd/x.co").mkdir(), r"lack 1 of the 5 .*: x\.co"),
    "empty": (lambda x: (x / _ONE).write_bytes(b""), rf"cannot be used: {_ONE}: empty"),
    "cut off": (lambda x: os.truncate(x / _ONE, 40), rf"cannot be used: {_ONE}: cut off"),
    "another architecture": (
        lambda x: (x / _ONE).write_bytes(kernel("gfx950", "_ZN5aiter3oneE")),
        rf"cannot be used: {_ONE}: for gfx950",
    ),
    "another kernel": (
        lambda x: shutil.copy(x / "fmha_v3_fwd/MI300/two.co", x / _ONE),
        rf"1 of the 7 .* are not those of its tables: {_ONE} lacks _ZN5aiter3oneE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change, message", KERNELS.values(), ids=KERNELS)
def test_kernels_that_are_not_those_of_the_tables_are_refused(
    hsa: Path, tmp_path: Path, change: Change, message: str
):
    change(hsa / "gfx942")
    with pytest.raises(BuildError, match=message):
        asm_tables.write(hsa, "gfx942", tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_an_architecture_without_tables_is_refused(hsa: Path, tmp_path: Path):
    with pytest.raises(BuildError, match="gfx950/fmha_v3_fwd has no table"):
        asm_tables.write(hsa, "gfx950", tmp_path)
