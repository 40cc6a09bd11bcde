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

MODULES = ("fmha_v3_fwd", "fmha_v3_bwd")
"""The folders of AITER's attention kernels. The header of one is asm_FOLDER_configs.hpp."""

_NAMES = ("knl_name", "co_name")
_TEXTS = (*_NAMES, "arch", "dtype")
_COMMENT = re.compile(r"/\*.*?\*/|^[ \t]*(?://|#|;)[^\n]*\n|[ \t]+(?://|#|;)[^\n]*", re.S | re.M)

Row = dict[str, str]


def write(hsa: Path, arch: str, folder: Path) -> int:
    """Write both headers into `folder`, from the folder hsa of AITER. Returns the number of kernels
    that they name.

    Raises:
      BuildError: a table is missing, or not in the form that is known here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for module in MODULES:
        tables = _tables(hsa / arch / module)
        text = header(module, arch, tables)
        path = folder / f"asm_{module}_configs.hpp"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        count += sum(map(len, tables.values()))
    return count


def files(hsa: Path, arch: str) -> list[str]:
    """The names of the kernels' files in the tables of an architecture."""
    found = (_tables(hsa / arch / module) for module in MODULES)
    return [row["co_name"] for tables in found for rows in tables.values() for row in rows]


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


def _tables(folder: Path) -> dict[str, list[Row]]:
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise BuildError(
            f"{folder} has no table (.csv) of ASM kernels: is this AITER v0.1.15 or newer, with "
            "its folder hsa?"
        )
    return {path.stem: list(_rows(path)) for path in files}


def _rows(path: Path) -> Iterable[Row]:
    text = _COMMENT.sub("", path.read_text(encoding="utf-8-sig"))
    for row in csv.DictReader(text.splitlines()):
        if None in row or None in row.values() or not {*_NAMES, "dtype"} <= row.keys():
            raise BuildError(f"{path} is no table of ASM kernels that is known here: {row}")
        bad = [x for x, y in row.items() if x not in _TEXTS and y and not y.isdecimal()]
        if bad or any(re.search(r'["\\]', row[x]) for x in (*_NAMES, "dtype")):
            raise BuildError(f"{path} has a row that is not known here: {row}")
        yield row
