"""Breaks the handlers of rocm_backend in one place at a time and checks that a test notices.

usage: python -m tests.scripts.mutate_rocm [PART OF A MUTATION'S NAME]

Every assignment to a field of aiter_api.h's structs, and every zeroing of memory, can be made
wrong: numbers by one, pointers by four bytes, flags inverted. The cases of aiter_cases.py, and the
cases with 16-bit atomics, run on the emulator until one of them fails the check of
tests/support/aiter_check.py. A mutation that no case notices survives; the exit status is 1 if any
does.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import jax
import rich.progress

from attn_dispatch.devices.target import parse
from tests.support import aiter_emulated
from tests.support.aiter_cases import CASES_BY_GFX, SIXTEEN_BIT_CASES
from tests.support.aiter_check import Check, sixteen_bit_atomics
from tests.support.emulator import build

_HEADER = """\
// The number of the mutation that is on; the others do not change their values.
#pragma once
#include <type_traits>
inline int mutation = -1;
template <typename T> T mutated(int id, T value) {
  if (id != mutation) return value;
  if constexpr (std::is_pointer_v<T>) {
    return value ? (T)((char*)value + 4) : value;
  } else if constexpr (std::is_same_v<T, bool>) {
    return !value;
  } else if constexpr (std::is_floating_point_v<T>) {
    return value * T(1.25) + T(0.25);
  } else if constexpr (std::is_enum_v<T>) {
    return (T)(((int)value + 1) % 3);
  } else {
    return value + 1;
  }
}
"""
_SETTER = """
extern "C" __attribute__((visibility("default"))) void set_mutation(int id) { mutation = id; }
"""
_ASSIGNED = re.compile(r"(?<=\n)( +(?:[\w.]*\bcall\.|forward\.|split\.)(\w+) =)(\s[^;]+);")
_STRUCTS = ("call_structs", "call_structs_split_kv")
_ZEROED = re.compile(r"fill_bytes\((call\.(\w+)), 0,")


def mutated_sources(folder: Path) -> list[str]:
    """Write the handlers with every mutation in them; return the mutations' names by number."""
    names: list[str] = []

    def wrap_value(found: re.Match[str]) -> str:
        line = found.string[: found.start()].count("\n") + 1
        names.append(f"{found[2]} ({path.name}:{line})")
        return f"{found[1]} mutated({len(names) - 1},{found[3]});"

    def wrap_zero(found: re.Match[str]) -> str:
        names.append(f"zeroing of {found[2]} ({path.name})")
        return f"fill_bytes({found[1]}, mutation == {len(names) - 1} ? 0x7f : 0,"

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(aiter_emulated.ROCM_BACKEND, folder)
    (folder / "mutated.h").write_text(_HEADER)
    for path in (folder / f"{x}.cc" for x in (*_STRUCTS, "handlers")):
        text = _ZEROED.sub(wrap_zero, _ASSIGNED.sub(wrap_value, path.read_text()))
        path.write_text('#include "mutated.h"\n' + text)
    # Attributes are decoded when a program is compiled, before any mutation is on. So their
    # mutations are placed where the decoded values are copied.
    fields = re.findall(r"site\.call\.(\w+) =", (folder / "call_site.cc").read_text())
    for path in (folder / f"{x}.cc" for x in _STRUCTS):
        changes = []
        for field in fields:
            changes.append(f"call.{field} = mutated({len(names)}, call.{field});")
            names.append(f"{field} (call_site.cc, in {path.name})")
        text = re.sub(
            r"  call = site.call;", "  call = site.call; " + " ".join(changes), path.read_text()
        )
        assert text.count(changes[0]) == 1
        path.write_text(text)
    path = folder / f"{_STRUCTS[0]}.cc"
    path.write_text(path.read_text() + _SETTER)
    return names


def notices(check: Check) -> bool:
    """Whether the check fails, by a wrong result or by an error."""
    try:
        errors = check.errors()
    except jax.errors.JaxRuntimeError:
        return True
    return not all(x <= 1 for x in errors.values()) or bool(check.differences_from_expected_calls())


def main() -> None:
    folder = build.FOLDER / "mutated_rocm_backend"
    names = mutated_sources(folder)
    path = aiter_emulated.build_module(folder, "_rocm_mutated")
    emulator = aiter_emulated.emulator(path)
    set_mutation: Callable[[int], None] = ctypes.CDLL(str(path)).set_mutation

    checks: list[tuple[str, Check]] = []
    # large_scores is left out: its gradient of key is only right relative to the delta that the
    # kernel gets, and `Check` does not use that.
    cases = [x for x in CASES_BY_GFX if x[0].name != "large_scores"]
    for case, gfx in rich.progress.track(cases, "compiling the cases"):
        emulator.set_arch(gfx)
        checks.append((gfx, Check.of(case, parse(gfx), emulator)))
    with sixteen_bit_atomics():
        for case, gfx in SIXTEEN_BIT_CASES:
            emulator.set_arch(gfx)
            checks.append((gfx, Check.of(case, parse(gfx), emulator)))

    def noticed_by(mutation: int) -> str | None:
        set_mutation(mutation)
        for gfx, check in checks:
            emulator.set_arch(gfx)
            if notices(check):
                return f"{check.case} on {gfx}"
        return None

    assert noticed_by(-1) is None, "a case fails without any mutation"
    chosen = [i for i, name in enumerate(names) if "".join(sys.argv[1:2]) in name]
    found = [noticed_by(i) for i in rich.progress.track(chosen, "mutating")]
    names = [names[i] for i in chosen]
    for name, case in zip(names, found, strict=True):
        print(f"{name}: {f'noticed by {case}' if case else 'SURVIVES'}")
    survivors = [name for name, case in zip(names, found, strict=True) if case is None]
    print(
        f"{len(found)} mutations, {len(survivors)} survive" + "".join(f"\n  {x}" for x in survivors)
    )
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
