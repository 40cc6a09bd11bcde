"""The tables of AITER's ASM kernels as C++, from the CSV files beside the kernels.

AITER's own generator needs pandas. Its headers hold the kernels of several architectures, and AITER
then finds a kernel that it has loaded by its name alone; these hold those of one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from attn_dispatch_tools.build_aiter.errors import BuildError

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

_NAMES = ("knl_name", "co_name")
_TEXTS = (*_NAMES, "arch", "dtype")
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
_COMMENT = re.compile(r"/\*.*?\*/|^[ \t]*(?://|#|;)[^\n]*\n|[ \t]+(?://|#|;)[^\n]*", re.S | re.M)

Row = dict[str, str]


def write(hsa: Path, arch: str, folder: Path) -> int:
    """Write both headers into `folder`, from the folder hsa of AITER. Returns the number of kernels
    that they name.

    Raises:
      BuildError: a table or a kernel is missing, or a table is not in the form that is known here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for module in MODULES:
        tables = _tables(hsa, arch, module)
        _refuse_parts(hsa / arch / module, tables)
        text = header(module, arch, tables)
        path = folder / f"asm_{module}_configs.hpp"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        count += sum(map(len, tables.values()))
    return count


def files(hsa: Path, arch: str) -> set[str]:
    """The names of the kernels' files in the tables of an architecture."""
    return {x for module in MODULES for x in _named(_tables(hsa, arch, module))}


def header(module: str, arch: str, tables: dict[str, list[Row]]) -> str:
    """The C++ header with the tables of a folder, by their names."""
    columns = list(dict.fromkeys(x for rows in tables.values() for row in rows for x in row))
    numbers = [x for x in columns if x not in _TEXTS]
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


def _entries(module: str, arch: str, numbers: list[str], rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        texts = (row["knl_name"], f"{module}/{row['co_name']}", arch, row["dtype"])
        values = [*(f'"{x}"' for x in texts), *(str(int(row.get(x, "") or 0)) for x in numbers)]
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
    tables = {name: list(_rows(path, _COLUMNS[module])) for name, path in there.items()}
    for name in MODULES[module]:
        if not tables[name] and (arch, name) not in _WITHOUT_ROWS:
            raise BuildError(f"{there[name]} names no kernel: expected AITER's whole table")
    return tables


def _named(tables: dict[str, list[Row]]) -> set[str]:
    return {row["co_name"] for rows in tables.values() for row in rows}


def _refuse_parts(folder: Path, tables: dict[str, list[Row]]) -> None:
    """Refuse a folder whose tables and kernels are not those of each other.

    AITER fails when a call needs a kernel whose file is missing. With a row missing it takes the
    call for one that no kernel runs.
    """
    named = _named(tables)
    there = {path.name for path in folder.rglob("*.co")}
    if missing := sorted(named - there):
        raise BuildError(
            f"{folder} lacks {len(missing)} of the {len(named)} ASM kernels in its tables: "
            f"{', '.join(missing[:3])}"
        )
    if unnamed := sorted(x for x in there - named if not _WITHOUT_TABLE.fullmatch(x)):
        raise BuildError(
            f"{folder}: its tables lack {len(unnamed)} of the {len(there)} ASM kernels there: "
            f"{', '.join(unnamed[:3])}"
        )


def _rows(path: Path, numbers: tuple[str, ...]) -> Iterable[Row]:
    try:
        text = _COMMENT.sub("", path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is no table of ASM kernels: it is no text") from error
    table = csv.DictReader(text.splitlines())
    needed = ("dtype", *_NAMES, *numbers)
    if missing := [x for x in needed if x not in (table.fieldnames or ())]:
        raise BuildError(
            f"{path} is no table of ASM kernels that is known here: it lacks the columns "
            f"{', '.join(missing)}"
        )
    for row in table:
        if None in row or None in row.values():
            raise BuildError(f"{path} is no table of ASM kernels that is known here: {row}")
        bad = [x for x, y in row.items() if x not in _TEXTS and not y.isdecimal()]
        if bad or any(re.search(r'["\\]', row[x]) for x in (*_NAMES, "dtype")):
            raise BuildError(f"{path} has a row that is not known here: {row}")
        yield row
