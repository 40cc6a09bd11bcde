"""The tables of AITER's ASM kernels as C++, from the CSV files beside the kernels.

AITER's own generator needs pandas. Its headers hold the kernels of several architectures, and AITER
then finds a kernel that it has loaded by its name alone; these hold those of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from attn_dispatch.aiter.library import unusable_kernels
from attn_dispatch_tools.build_aiter import asm_rows
from attn_dispatch_tools.build_aiter.asm_rows import Row
from attn_dispatch_tools.terminal.building import BuildError

MODULES = {
    "fmha_v3_fwd": ("fmha_fwd",),
    "fmha_v3_bwd": (
        "fmha_bwd_dq_convert",
        "fmha_bwd_dq_shuffle",
        "fmha_bwd_dqdkdv",
        "fmha_bwd_odo",
    ),
}
"""The folders of AITER's attention kernels and the tables that its C++ reads from each. The header
of a folder is asm_FOLDER_configs.hpp."""

_TEXTS = (*asm_rows.NAMES, "arch", "dtype")
_COLUMNS = {
    "fmha_v3_fwd": ("hdim_q", "hdim_v", "mask", "mode", "bf16_cvt", "ts_qo", "ts_kv"),
    "fmha_v3_bwd": (
        "hdim_q", "hdim_v", "mask", "atomic32", "pssk", "pddv", "mode", "bf16_cvt", "ts_qo", "ts",
    ),
}  # fmt: skip
"""The numbers that AITER's C++ reads from the tables of each folder."""
_WITHOUT_ROWS = {("gfx942", "fmha_bwd_dq_shuffle")}
"""The tables without rows: no kernel of gfx942 shuffles."""
_WITHOUT_TABLE = re.compile(r"bwd_hd128_.*_swa_.*\.co")
"""gfx950 has four kernels that no table of AITER names."""
_SUBFOLDERS = {("gfx942", "fmha_v3_fwd"): ("MI300", "MI308")}
"""Where AITER's C++ looks for a kernel in a subfolder: that of the GPU (get_kernel_co_name)."""
_SHOWN = 3


def write(hsa: Path, arch: str, folder: Path) -> int:
    """Write both headers into `folder`, from the folder hsa of AITER. Returns the number of kernels
    that they name.

    Raises:
      BuildError: a table or a kernel is missing, or a table is not in the form that is known here.
    """
    tables = {module: _tables(hsa, arch, module) for module in MODULES}
    _refuse_parts(hsa / arch, tables)
    folder.mkdir(parents=True, exist_ok=True)
    for module, of_module in tables.items():
        text = header(module, arch, of_module)
        path = folder / f"asm_{module}_configs.hpp"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return sum(len(rows) for x in tables.values() for rows in x.values())


def files(hsa: Path, arch: str) -> set[str]:
    """The names of the kernels' files in the tables of an architecture."""
    tables = (_tables(hsa, arch, module) for module in MODULES)
    return {row["co_name"] for x in tables for rows in x.values() for row in rows}


def header(module: str, arch: str, tables: dict[str, list[Row]]) -> str:
    """The C++ header with the tables of a folder, by their names."""
    numbers = _COLUMNS[module]
    fields = [f"  std::string {x};" for x in _TEXTS] + [f"  int {x};" for x in numbers]
    lines = [
        "// Made by attn-dispatch build-aiter.",
        "#pragma once",
        "#include <string>",
        "#include <unordered_map>",
        f"struct {module}Config {{",
        *fields,
        "};",
        f"using CFG = std::unordered_map<std::string, {module}Config>;",
    ]
    for name, rows in tables.items():
        lines += [f"static CFG cfg_{name} = {{", *_entries(module, arch, numbers, rows), "};"]
    return "\n".join([*lines, ""])


def _entries(module: str, arch: str, numbers: Iterable[str], rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        texts = (row["knl_name"], f"{module}/{row['co_name']}", arch, row["dtype"])
        values = [*(f'"{x}"' for x in texts), *(str(int(row[x])) for x in numbers)]
        yield f'  {{"{arch}{row["knl_name"]}", {{{", ".join(values)}}}}},'


def _tables(hsa: Path, arch: str, module: str) -> dict[str, list[Row]]:
    folder = hsa / arch / module
    there = {path.stem: path for path in sorted(folder.glob("*.csv"))}
    if not there:
        raise BuildError(
            f"{folder} has no table (.csv) of ASM kernels: is this AITER v0.1.15 or newer, with "
            "its folder hsa?"
        )
    if missing := [f"{x}.csv" for x in MODULES[module] if x not in there]:
        raise BuildError(f"{folder} lacks {', '.join(missing)}: expected a whole folder of AITER's")
    if bad := [x.name for x in there.values() if not re.fullmatch(r"\w+", x.stem, re.ASCII)]:
        raise BuildError(f"{folder}: expected a name in C++ as a table's, got {bad[0]!r}")
    tables = {x: asm_rows.read(y, module, _COLUMNS[module]) for x, y in there.items()}
    _refuse_repeats(folder, tables)
    for name in MODULES[module]:
        if not tables[name] and (arch, name) not in _WITHOUT_ROWS:
            raise BuildError(f"{there[name]} names no kernel: expected AITER's whole table")
    return tables


def _refuse_repeats(folder: Path, tables: dict[str, list[Row]]) -> None:
    """AITER finds a kernel that it has loaded by its name alone, whatever table it is from."""
    tables_of: dict[str, list[str]] = {}
    for table, rows in tables.items():
        for row in rows:
            tables_of.setdefault(row["knl_name"], []).append(f"{table}.csv")
    if twice := next((x for x, y in tables_of.items() if len(y) > 1), ""):
        raise BuildError(
            f"{folder}: expected each kernel in one table, got {twice} in "
            f"{' and '.join(tables_of[twice])}"
        )


def _refuse_parts(folder: Path, tables: dict[str, dict[str, list[Row]]]) -> None:
    """Refuse a folder whose tables and kernels are not those of each other.

    AITER fails when a call needs a kernel whose file is missing. With a row missing it takes the
    call for one that no kernel runs.
    """
    named = {x: y for module in tables for x, y in _paths(folder.name, module, tables[module])}
    for module in tables:
        _refuse_other_files(folder / module, {x for x in named if x.startswith(f"{module}/")})
    if why := unusable_kernels(folder, folder.name, 0):
        raise BuildError(why)
    # As the symbol of its descriptor.
    others = [x for x, y in named.items() if f"{y}.kd\0".encode() not in (folder / x).read_bytes()]
    if others:
        shown = "; ".join(f"{x} lacks {named[x]}" for x in others[:_SHOWN])
        raise BuildError(
            f"{len(others)} of the {len(named)} ASM kernels in {folder} are not those of its "
            f"tables: {shown}"
        )


def _paths(arch: str, module: str, tables: dict[str, list[Row]]) -> Iterable[tuple[str, str]]:
    """The files that AITER's C++ looks for, and the name of the kernel in each."""
    for subfolder in _SUBFOLDERS.get((arch, module), (".",)):
        for rows in tables.values():
            for row in rows:
                yield str(Path(module, subfolder, row["co_name"])), row["knl_name"]


def _refuse_other_files(folder: Path, paths: set[str]) -> None:
    named = {str(Path(x).relative_to(folder.name)) for x in paths}
    there = {str(x.relative_to(folder)) for x in folder.rglob("*.co")}
    if missing := sorted(x for x in named if x not in there or not (folder / x).is_file()):
        raise BuildError(
            f"{folder} lacks {len(missing)} of the {len(named)} ASM kernels in its tables: "
            f"{', '.join(missing[:_SHOWN])}"
        )
    if unnamed := sorted(x for x in there - named if not _WITHOUT_TABLE.fullmatch(x)):
        raise BuildError(
            f"{folder}: its tables lack {len(unnamed)} of the {len(there)} ASM kernels there: "
            f"{', '.join(unnamed[:_SHOWN])}"
        )
