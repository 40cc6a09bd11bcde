"""Breaks the handlers of rocm_backend in one place at a time and checks that a test notices.

usage: python -m tests.scripts.mutate_rocm [--machine-code] [PART OF A MUTATION'S NAME]

Every assignment to a field of aiter_api.h's structs, and every zeroing of memory, can be made
wrong: numbers by one, pointers by four bytes, flags inverted. The cases of aiter_cases.py, the
cases with 16-bit atomics, and those with gaps on AITER v0.1.20 run on the emulator until one of
them fails the check of tests/support/aiter_check.py. A mutation that no case notices survives; the
exit status is 1 if any does.

With --machine-code the calls of tests/cdna judge in their place, by AITER's dispatch and kernels
alone: the wheel's and, if ATTN_DISPATCH_AITER_DIR names a folder, those of AITER's sources. What
only CK's calls have is not reached by them, and does not count as a survivor.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import jax
import rich.progress

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support import aiter_emulated
from tests.support.aiter_cases import AITER_CASES, CASES_BY_GFX, SIXTEEN_BIT_CASES
from tests.support.aiter_check import Check, sixteen_bit_atomics
from tests.support.cdna.judges import Judge, machine_code_judges
from tests.support.emulator import build
from tests.support.emulator.native import Emulator

SURVIVES = "SURVIVES"
NEWER = Release("v0.1.15", (0, 1, 20))
WITH_GAPS = ("lengths", "segments")
"""The names of cases whose lengths newer releases take as prefix sums."""

_HEADER = """\
// The number of the mutation that is on; the others do not change their values.
#pragma once
#include <type_traits>
inline int mutation = -1;
inline bool reached[1000];  // since set_mutation
template <typename T> T mutated(int id, T value) {
  reached[id] = true;
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
inline int mutated_zero(int id) {
  reached[id] = true;
  return id == mutation ? 0x7f : 0;
}
"""
_HOOKS = """
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void set_mutation(int id) {
  mutation = id;
  for (bool& x : reached) x = false;
}
EXPORTED int is_reached(int id) { return reached[id]; }
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
        return f"fill_bytes({found[1]}, mutated_zero({len(names) - 1}),"

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
            is_flag = " != 0" if field.startswith("use_") else ""
            changes.append(f"call.{field} = mutated({len(names)}, call.{field}{is_flag});")
            names.append(f"{field} (call_site.cc, in {path.name})")
        text = re.sub(
            r"  call = site.call;", "  call = site.call; " + " ".join(changes), path.read_text()
        )
        assert text.count(changes[0]) == 1
        path.write_text(text)
    path = folder / f"{_STRUCTS[0]}.cc"
    path.write_text(path.read_text() + _HOOKS)
    return names


def notices(check: Check) -> bool:
    """Whether the check fails, by a wrong result or by an error."""
    try:
        errors = check.errors()
    except jax.errors.JaxRuntimeError:
        return True
    return not all(x <= 1 for x in errors.values()) or bool(check.differences_from_expected_calls())


@contextmanager
def built(release: Release) -> Iterator[None]:
    """Plan calls for a release of AITER."""
    with mock.patch.object(aiter_folder, "release", lambda _: release):
        yield


def emulated(emulator: Emulator) -> Iterator[Judge]:
    """The cases of aiter_cases.py on the emulator, compiled."""

    def judge(case: Case, gfx: str, release: Release = DEV18) -> Judge:
        emulator.set_arch(gfx)
        with built(release):
            check = Check.of(case, parse(gfx), emulator)
        if release != DEV18:  # `chosen` is dev18's
            check = replace(check, chosen={})

        def notices_now() -> bool:
            emulator.set_arch(gfx)
            return notices(check)

        return Judge(f"{case} on {gfx} by {release.generation}", notices_now)

    # large_scores is left out: its gradient of key is only right relative to the delta that the
    # kernel gets, and `Check` does not use that.
    yield from (judge(*x) for x in CASES_BY_GFX if x[0].name != "large_scores")
    with sixteen_bit_atomics():
        yield from (judge(*x) for x in SIXTEEN_BIT_CASES)
    yield from (judge(x, "gfx942", NEWER) for x in AITER_CASES if x.name in WITH_GAPS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine-code", action="store_true")
    parser.add_argument("part", nargs="?", default="")
    chosen = parser.parse_args()
    folder = build.FOLDER / "mutated_rocm_backend"
    names = mutated_sources(folder)
    path = aiter_emulated.build_module(folder, "_rocm_mutated")
    emulator = aiter_emulated.emulator(path)
    library = ctypes.CDLL(str(path))
    judges = machine_code_judges() if chosen.machine_code else emulated(emulator)
    reached: dict[Judge, set[int]] = {}
    for judge in rich.progress.track(list(judges), "running the cases"):
        library.set_mutation(-1)
        assert not judge.notices(), f"{judge.name} fails without any mutation"
        reached[judge] = {n for n in range(len(names)) if library.is_reached(n)}

    def result_of(mutation: int) -> str:
        library.set_mutation(mutation)
        reaching = [judge for judge, found in reached.items() if mutation in found]
        by = next((judge.name for judge in reaching if judge.notices()), None)
        return f"noticed by {by}" if by else SURVIVES if reaching else "is not reached"

    results: dict[str, str] = {}
    for n in rich.progress.track([n for n, x in enumerate(names) if chosen.part in x], "mutating"):
        results[names[n]] = result_of(n)
        print(f"{names[n]}: {results[names[n]]}", flush=True)
    survivors = [name for name, result in results.items() if result == SURVIVES]
    unreached = sum(x == "is not reached" for x in results.values())
    print(f"{len(results)} mutations, {unreached} not reached, {len(survivors)} survive")
    sys.exit(bool(survivors) or (unreached > 0 and not chosen.machine_code))


if __name__ == "__main__":
    main()
