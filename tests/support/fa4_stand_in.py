"""A stand-in for the compiler of FlashAttention-4's kernels: kernels of a few loops in C.

Objects and symbols are those that export_kernels.py writes, so build-fa4 links them as they are.
As a program, `python -m tests.support.fa4_stand_in FOLDER SET` takes the script's arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4 import linking, score_mods
from attn_dispatch_tools.build_fa4.compiling import Compiled
from attn_dispatch_tools.build_fa4.sets import SETS, KernelSet
from tests.support.emulator import build
from tests.support.repository import ROOT

SOURCE = Path(__file__).parent / "fa4_emulator" / "kernels.c"
BUILD_FA4 = Path(linking.__file__).parent

WITHOUT_SINKS = "sm100_d64_float16"
NAMES = (
    "sm90_d64_bfloat16", "sm90_d64_float16", "sm90_d96_float16", "sm90_d192_128_bfloat16",
    WITHOUT_SINKS, "sm90_d384_bfloat16", "sm90_d512_bfloat16", "sm90_d512_float16",
)  # fmt: skip
"""Sets that differ in what matters to the handlers: dtype, subtiles, whether gradients of grouped
heads, and sinks, are there, and whether heads are wide."""

MODS = (
    "attn_dispatch.mods:soft_cap(3.0)",
    "attn_dispatch.mods:alibi([1.0])",
    "tests.support.score_mods:by_head_and_place",
)
"""The score_mods that some sets are compiled with as well."""


def compile_set(folder: Path, given: dict) -> None:
    """Write the objects and symbols of a set, described as KernelSet.as_json does."""
    symbols = {}
    for kernel in given["kernels"]:
        name = f"{given['name']}_{kernel}"
        defines = {"KERNEL": kernel, "NAME": f'"{name}"', **_facts(given), **_change(given)}
        command = ["cc", "-std=gnu11", "-O2", "-ffast-math", "-fno-finite-math-only", "-fPIC"]
        command += [*build.SANITIZE, f"-I{BUILD_FA4}", "-Wall", "-Werror", "-Wno-unused-function"]
        command += [f"-D{x}={y}" for x, y in defines.items()]
        output = folder / f"{kernel}.o"
        subprocess.run([*command, "-c", str(SOURCE), "-o", str(output)], check=True)
        symbols[kernel] = f"_mlir_{name}_run"
    (folder / "symbols.json").write_text(json.dumps(symbols))


def _facts(given: dict) -> dict[str, int]:
    forward, backward = given["forward"], given["backward"]
    tangent = given["tangent"] or {"tile_m": 0, "tile_n": 0}
    return {
        "IS_BFLOAT16": int(given["dtype"] == "bfloat16"),
        "HEAD_DIM": given["head_dim"], "HEAD_DIM_V": given["head_dim_v"],
        "FORWARD_M": forward["tile_m"], "FORWARD_N": forward["tile_n"],
        "BACKWARD_M": backward["tile_m"], "BACKWARD_N": backward["tile_n"],
        "SUBTILES": backward["subtiles"],
        "TANGENT_M": tangent["tile_m"], "TANGENT_N": tangent["tile_n"],
    }  # fmt: skip


def _change(given: dict) -> dict[str, str]:
    """The change of scores of a variant as C."""
    if (variant := given["variant"]) is None:
        return {}
    types = {"f": "float", "i": "int32_t", "p": "int"}
    arrays = ""
    for i, letter in enumerate(variant["types"]):
        one = f"((AttnFa4ModArray*)arrays[{i}])"
        arrays += f"const {types[letter]}* o{i} = {one}->data; "
        arrays += f"const int32_t o{i}_length = {one}->shape[0]; "
        arrays += f"(void)o{i}; (void)o{i}_length; "

    def in_c(code: str) -> str:
        lines = code.split("; ")
        return " ".join(f"{'' if x.startswith('return') else types[x[0]]} {x};" for x in lines)

    return {
        "FORWARD_CODE": in_c(variant["forward"]),
        "BACKWARD_CODE": in_c(variant["backward"] or "return g"),
        "MOD_ARRAYS": arrays,
        "MOD_COUNT": str(len(variant["types"])),
    }


def sets() -> list[KernelSet]:
    """The sets of the library: those of NAMES, and two of each mod."""
    plain = [SETS[x] for x in NAMES]
    return [*plain, *(replace(x, variant=score_mods.variant(y)) for y in MODS for x in plain[:2])]


def library(folder: Path, chosen: Sequence[KernelSet] | None = None) -> Path:
    """Build a library of these sets in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    compiled = []
    for one in sets() if chosen is None else chosen:
        objects = folder / one.name
        shutil.rmtree(objects, ignore_errors=True)
        objects.mkdir(parents=True)
        compile_set(objects, one.as_json())
        compiled.append(Compiled(one, objects))
    target = folder / fa4_folder.LIBRARY
    with mock.patch.dict(os.environ, CC=str(linker(folder))):
        linking.link(compiled, target)
    return target


def linker(folder: Path) -> Path:
    """A C compiler for $CC that also links what the stand-ins need: libm, and sanitizers."""
    script = folder / "cc-with-libm"
    script.write_text(f'#!/bin/sh\nexec cc "$@" -lm {" ".join(build.SANITIZE)}\n')
    script.chmod(0o755)
    return script


_OUTSIDE = """\
#!{python}
import pathlib, sys
assert sys.argv[1:4] == ["-I", "-m", "venv"], sys.argv
inside = pathlib.Path(sys.argv[4], "bin", "python")
inside.parent.mkdir(parents=True)
inside.write_text({inside!r})
inside.chmod(0o755)
"""

_INSIDE = """\
#!{python}
import json, os, pathlib, sys
assert sys.argv[1] == "-I", sys.argv
given, log = sys.argv[2:], pathlib.Path({log!r})
failing = pathlib.Path(str(log) + ".failing")
is_pip = given[:3] == ["-m", "pip", "install"]
what = given[-1] if is_pip else json.loads(given[2])["name"]
with log.open("a") as file:
    file.write(what + "\\n")
if failing.exists() and failing.read_text() in what:
    sys.exit("it went wrong")
if not is_pip:
    os.environ["PYTHONPATH"] = {path!r}
    os.execv({python!r}, [{python!r}, "-m", "tests.support.fa4_stand_in", *given[1:]])
for package in given[given.index("--no-deps") + 1 :] if "--no-deps" in given else ():
    packages = pathlib.Path(sys.argv[0]).parents[1] / "lib" / "python3.12" / "site-packages"
    name = package.replace("-", "_").replace("==", "-") + ".dist-info"
    licences = packages / name / "licenses"
    licences.mkdir(parents=True)
    (licences / "LICENSE").write_text("a licence of " + package)
"""


@dataclass(frozen=True)
class StandInPython:
    """A Python for --python, which installs nothing and compiles stand-ins."""

    path: Path
    _log: Path

    def taken(self) -> list[str]:
        """What was installed (the last argument of pip) and compiled (sets) since the last time."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines

    def fail(self, what: str) -> None:
        """Let installing or compiling whatever has this in its name fail; "" ends that."""
        failing = self._log.with_name(self._log.name + ".failing")
        failing.write_text(what) if what else failing.unlink()


def python(folder: Path) -> StandInPython:
    """Write the stand-in into `folder`."""
    log = folder / "taken"
    paths = os.pathsep.join(map(str, (ROOT, *sys.path)))
    inside = _INSIDE.format(python=sys.executable, log=str(log), path=paths)
    outside = folder / "python"
    outside.write_text(_OUTSIDE.format(python=sys.executable, inside=inside))
    outside.chmod(0o755)
    return StandInPython(outside, log)


if __name__ == "__main__":
    compile_set(Path(sys.argv[1]), json.loads(sys.argv[2]))
