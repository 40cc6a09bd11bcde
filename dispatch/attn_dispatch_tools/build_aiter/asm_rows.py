"""The rows of AITER's tables of ASM kernels (.csv), checked for what its C++ can mean by them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch.files import reading
from attn_dispatch.text import error_text
from attn_dispatch_tools.terminal.building import BuildError

Row = dict[str, str]

NAMES = ("knl_name", "co_name")
TEXTS = {
    "dtype": (r"bf16|fp16|fp8bf16", "bf16, fp16 or fp8bf16"),
    # Part of a string in C++ and the name of a symbol.
    "knl_name": (r"[A-Za-z_]\w{,254}", "the name of a kernel"),
    "co_name": (r"[\w-]{1,200}\.co", "the name of a file (.co)"),
}
"""The texts of a row: a pattern of each, and what it says."""
_HEAD_DIM, _TILE, _FLAG = range(8, 1025, 8), range(1, 4097), range(2)
_NUMBERS = {
    "hdim_q": _HEAD_DIM,
    "hdim_v": _HEAD_DIM,
    "mask": range(4),
    "atomic32": _FLAG,
    "pssk": _FLAG,
    "pddv": _FLAG,
    "mode": _FLAG,
    "bf16_cvt": range(4),
    "ts": _TILE,  # AITER divides by it
    "ts_kv": _TILE,
}
_TS_QO = {"fmha_v3_fwd": _TILE, "fmha_v3_bwd": range(4097)}
"""Only the forward pass divides by this one."""
_MAX_BYTES = 2**20
_SHOWN = 80
_COMMENT = re.compile(r"/\*.*?\*/|^[ \t]*(?://|#|;)[^\n]*|[ \t]+(?://|#|;)[^\n]*", re.S | re.M)


def read(path: Path, module: str, numbers: Sequence[str]) -> list[Row]:
    """The rows of a table.

    Args:
      path: the table.
      module: the folder of AITER's kernels that it belongs to.
      numbers: its columns beside TEXTS.

    Raises:
      BuildError: a row means nothing to AITER's C++, or the same as another.
    """
    try:
        text = reading.text(path, _MAX_BYTES).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        raise BuildError(f"no table of ASM kernels: {error_text(error)}") from error
    # The lines keep their numbers.
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    lines = [(x, y.split(",")) for x, y in enumerate(text.splitlines(), 1) if y.strip()]
    columns = lines[0][1] if lines else []
    _check_columns(path, columns, [*TEXTS, *numbers])
    ranges = {**_NUMBERS, "ts_qo": _TS_QO[module]}
    rows: list[Row] = []
    seen: dict[tuple[str, ...], int] = {}
    for number, values in lines[1:]:
        where = f"{path}, line {number}"
        if len(values) != len(columns):
            raise BuildError(f"{where}: expected {len(columns)} values, got {len(values)}")
        row = dict(zip(columns, values, strict=True))
        for name, value in row.items():
            if expected := _expected(name, value, ranges):
                raise BuildError(f"{where}: expected {expected} as {name}, got {_short(value)}")
        calls = tuple(y for x, y in row.items() if x not in NAMES)
        for key, what in (((row["knl_name"],), "kernel"), (calls, "calls")):
            if key in seen:
                raise BuildError(f"{where}: has the {what} of line {seen[key]}: {', '.join(key)}")
            seen[key] = number
        rows.append(row)
    return rows


def _check_columns(path: Path, columns: list[str], known: list[str]) -> None:
    if missing := [x for x in known if x not in columns]:
        raise BuildError(
            f"{path} is no table of ASM kernels that is known here: it lacks the columns "
            f"{', '.join(missing)}"
        )
    rest = list(columns)
    for name in known:
        rest.remove(name)
    if rest:
        raise BuildError(
            f"{path} is no table of ASM kernels that is known here: expected the columns "
            f"{', '.join(known)}, got also {_short(', '.join(rest))}"
        )


def _expected(name: str, value: str, ranges: dict[str, range]) -> str:
    """What a value should be; empty if it is."""
    if name in TEXTS:
        pattern, expected = TEXTS[name]
        return "" if re.fullmatch(pattern, value, re.ASCII) else expected
    known = ranges[name]
    if re.fullmatch(r"[0-9]{1,9}", value) and int(value) in known:
        return ""
    kind = "a number" if known.step == 1 else f"a multiple of {known.step}"
    return f"{kind} from {known.start} to {known[-1]}"


def _short(value: str) -> str:
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r} … ({len(value):,} letters)"
