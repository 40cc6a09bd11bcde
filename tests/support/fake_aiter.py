"""Tiny stand-ins for the amd-aiter wheel and for a compiler, for tests of build-aiter."""

from __future__ import annotations

import platform
import shutil
import struct
import sys
from pathlib import Path

import pytest

from attn_dispatch.aiter.folder import WHEEL_VERSION
from attn_dispatch.devices import code_files
from attn_dispatch_tools.build_aiter.toolchain import Toolchain

needs_ninja = pytest.mark.skipif(
    not (shutil.which("ninja") or Path(sys.executable).with_name("ninja").exists()),
    reason="needs ninja",
)

# The parts of CK's generator that the build uses: filters, a dispatch file, a list of files.
_CK_GENERATOR = """
import argparse, fnmatch, pathlib
parser = argparse.ArgumentParser()
for name in ("targets", "direction", "receipt", "filter", "output_dir", "list_blobs"):
    parser.add_argument("--" + name)
args = parser.parse_args()
features = ["ndropout_nskip", "dropout_nskip", "dropout_storerandval_nskip", "ndropout_skip"]
names = [f"fmha_{args.direction}_d{d}_bf16_batch_{f}" for d in (64, 128) for f in features]
pattern = args.filter.split("@")[-1]
names = [name for name in names if fnmatch.fnmatch(name, pattern)]
files = [f"{name}_{args.targets}.cpp" for name in names] + [f"fmha_{args.direction}_api.cpp"]
if args.list_blobs:
    pathlib.Path(args.list_blobs).write_text("\\n".join(files))
else:
    for file in files:
        pathlib.Path(args.output_dir, file).write_text(f"// {file}\\n")
"""

# AITER's generators: each writes one file, which names its GPU.
_AITER_GENERATOR = """
import sys, pathlib
from chip_info import get_gfx_list
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
(folder / "NAME.cpp").write_text(f"using trait_0 = int;  // {get_gfx_list()}\\n")
"""

_COMPILER = """
import os, pathlib, sys, time
escape = lambda path: str(path).replace("$", "$$").replace(" ", "\\\\ ")
arguments = sys.argv[2:]
target = pathlib.Path(arguments[arguments.index("-o") + 1])
if "-c" in arguments:
    source = pathlib.Path(arguments[arguments.index("-c") + 1])
    if "broken" in source.read_text():
        sys.exit(f"{source.name}: error: this is broken")
    rule = f"{escape(target)}: {escape(source)}\\n"
    target.with_name(target.name + ".d").write_text(rule)
with open(sys.argv[1], "a") as log:
    log.write(target.name + "\\n")
target.write_text("built")
"""


def code_object(arch: str) -> bytes:
    """The file of an ASM kernel, without a kernel: the header of its ELF and no sections."""
    flags = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}[arch]
    return struct.pack("<5s13xH20xQI6xHH2x", b"\x7fELF\x02", 224, 64, flags, 0, 0)


def shared_library(machine: int | None = None) -> bytes:
    """The header of a library for this computer, or for another ELF machine, and nothing else."""
    numbers = {name: number for number, name in code_files._MACHINES.items()}
    machine = numbers[platform.machine()] if machine is None else machine
    return code_files._HEADER.pack(b"\x7fELF", b"\x02\x01", machine, 0, 0, 0)


def make_wheel(folder: Path, version: str = WHEEL_VERSION) -> None:
    """Write the stand-in for the unpacked wheel into `folder`."""
    information = folder / f"amd_aiter-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Name: amd-aiter\nVersion: {version}\n")
    meta = folder / "aiter_meta"
    scripts = {"3rdparty/composable_kernel/example/ck_tile/01_fmha/generate.py": _CK_GENERATOR}
    for path in (
        "csrc/cpp_itfs/mha_fwd_generate.py",
        "csrc/cpp_itfs/mha_bwd_generate.py",
        "csrc/py_itfs_cu/fmha_bwd_pre_post_kernel_generate.py",
        "hsa/gfx942/fmha_v3_fwd/codegen.py",
        "hsa/gfx942/fmha_v3_bwd/codegen.py",
    ):
        name = "_".join(Path(path).with_suffix("").parts[-2:])
        scripts[path] = _AITER_GENERATOR.replace("NAME", name)
    for path, text in scripts.items():
        (meta / path).parent.mkdir(parents=True, exist_ok=True)
        (meta / path).write_text(text)
    for path in ("fmha_v3_fwd/MI300/fwd.co", "fmha_v3_bwd/bwd.co"):
        (meta / "hsa/gfx942" / path).parent.mkdir(parents=True, exist_ok=True)
        (meta / "hsa/gfx942" / path).write_bytes(b"kernel")


def make_toolchain(folder: Path) -> tuple[Toolchain, Path]:
    """A compiler that only logs the names of its targets, and its log."""
    script, log = folder / "compiler.py", folder / "compiled.txt"
    script.write_text(_COMPILER)
    log.touch()
    command = (sys.executable, "-S", str(script), str(log))
    runner = folder / "link"
    runner.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    runner.chmod(0o755)
    return Toolchain("a stand-in", command, (str(runner),), compile_check_only=True), log
