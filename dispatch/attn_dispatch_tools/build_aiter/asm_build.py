"""Building AITER v0.1.15 or later: its ASM kernels alone, in one library and some seconds.

AITER's forward and backward are two source files, which load the kernels from files. Without CK
(ENABLE_CK=0) they need neither its headers nor PyTorch.
"""

from __future__ import annotations

import time
from pathlib import Path

from attn_dispatch.aiter import asm_rules
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.folder import AiterBuild
from attn_dispatch.aiter.release import Release, text_of
from attn_dispatch_tools.build_aiter import asm_tables, install, ninja, progress, toolchain, wheel
from attn_dispatch_tools.build_aiter.checkout import RECOMMENDED, Checkout
from attn_dispatch_tools.build_aiter.generate import Filters
from attn_dispatch_tools.build_aiter.ninja import Library
from attn_dispatch_tools.terminal.building import BuildError

GENERATION = "v0.1.15"
OPTIONS = ("-DENABLE_CK=0", "-DFAV3_ON=1", "-DONLY_FAV3=1")
"""The options of AITER's sources: no CK; ASM kernels in the forward and the backward pass."""

_NO_CK_KERNELS = Filters("", "", "")
_SOURCES = ("mha_fwd.cu", "mha_bwd.cu")
_OLDEST_HIP = (6, 2)  # AITER finds its kernels with hipGetFuncBySymbol


def build(checkout: Checkout, arch: str, folder: Path, jobs: int) -> AiterBuild:
    """Compile, link and install for one architecture.

    Raises:
      BuildError: the sources, the compiler or the kernels are not what this needs.
    """
    started = time.monotonic()
    work = folder / "work"
    ninja.find_ninja()
    tools = toolchain.find(arch, work)
    if tools.compile_check_only or tools.hip < _OLDEST_HIP:
        raise BuildError(
            f"AITER {checkout.text} needs ROCm 6.2 or newer, and this is {tools.description}"
        )
    print(f"AITER {checkout.text}, its ASM kernels for {arch}, with {tools.description}")
    for lack in asm_rules.lacks(checkout.version, arch):
        print(f"  {lack}")
    if checkout.version < RECOMMENDED:
        print(f"  AITER {text_of(RECOMMENDED)} or newer is recommended")
    if doubt := Release(GENERATION, checkout.version).doubt:
        print(f"  {doubt}")
    asm_tables.write(checkout.hsa, arch, work / "tables")
    library = _library(checkout, arch, work)
    ninja.write(work, tools, [library])
    with progress.steps("Compiling") as report:
        ninja.run(work, jobs, report)
    done = install.install(
        folder, tools, _NO_CK_KERNELS,
        generation=GENERATION, version=checkout.text, arch=arch, libraries=(library.name,),
        kernels=checkout.hsa / arch, files=len(library.sources),
    )  # fmt: skip
    seconds = time.monotonic() - started
    print(f"{folder}: {library.name} and {done.asm_kernels} ASM kernels; {seconds:.0f} seconds")
    return done


def _library(checkout: Checkout, arch: str, work: Path) -> Library:
    adapter = wheel.adapter_folder()
    environment = tuple(adapter / name for name in wheel.ENVIRONMENT)
    sources = (
        *(checkout.csrc / "cpp_itfs" / name for name in _SOURCES),
        *wheel.adapter_sources(adapter, GENERATION),
        *environment,
    )
    includes = (checkout.csrc / "include", work / "tables", adapter)
    return Library(
        aiter_folder.ADAPTER,
        sources,
        # AITER's headers use this one without including it.
        (*OPTIONS, *(f"-I{x}" for x in includes), "-include", "unordered_map"),
        (),
        # AITER's functions are exported, and must not be those of another library in the process.
        (*ninja.WRAPPED, "-Wl,-Bsymbolic"),
        wheel.environment_flags(arch, asm_root=True),
    )
