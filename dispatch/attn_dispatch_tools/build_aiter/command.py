"""The `attn-dispatch build-aiter` command."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.console import waiting
from attn_dispatch_tools.build_aiter import (
    asm_build,
    checkout,
    flags,
    install,
    ninja,
    progress,
    toolchain,
    wheel,
)
from attn_dispatch_tools.build_aiter.generate import Filters, Sources, generate
from attn_dispatch_tools.build_aiter.ninja import Library
from attn_dispatch_tools.terminal.building import BuildError, ending_with_a_message
from attn_dispatch_tools.terminal.folder import made_folder
from attn_dispatch_tools.terminal.help import Commands, add_command, option
from attn_dispatch_tools.terminal.number_arguments import at_least

_DESCRIPTION = """\
Build AITER's attention libraries for AMD GPUs from the sources in the amd-aiter wheel, together
with the small library through which attn_dispatch calls them.

A complete build compiles some 6300 files for each architecture, half a minute each: hours on a
large machine. A filter builds fewer of CK's kernels. attn_dispatch does not know which kernels were
built, so a call that needs a missing one fails when it runs, and says so. AITER's ASM kernels need
no compilation and are always complete.

With --aiter, ASM kernels alone are built from another AITER, v0.1.15 or newer: two files, less than
a minute. Calls that need CK are then XLA's, or those of a build from the wheel, if that exists too.

To continue an interrupted build, give the same command again.
"""

_FILTER_HELP = """\
The name of a kernel lists what it supports:

  fmha_fwd_d128_bf16_batch_…_nlogits_nbias_mask_lse_ndropout_…
  fmha_bwd_d128_bf16_group_…_nbias_ndbias_mask_ndropout_ndeterministic_…
  fmha_fwd_splitkv_d128_bf16_batch_…_nlogits_nbias_nmask_lse_nsquant_pagedkv

The last is a kernel for serving, with keys in pages (npagedkv: with a cache for each row).
d is the head dimension. batch means rows of a batch, and group packed sequences. n before a
feature means "without". --filter takes a part of such a name, with * for anything: 'd128_bf16',
'd64_bf16_batch*_nbias_'.
"""
_EXAMPLES = (
    "attn-dispatch build-aiter --arch gfx942",
    "attn-dispatch build-aiter --arch gfx950 --filter d128_bf16 --jobs 32",
    "attn-dispatch build-aiter --arch gfx942 --aiter ~/aiter",
)

# Seconds to compile a file for gfx942 with clang 22, on an otherwise idle core.
_SECONDS = {"forward": 27, "backward": 37, "other": 20}
_BYTES_PER_JOB = 2 << 30


def add_parser(commands: Commands, help: str) -> None:
    """Add `build-aiter` to the parser of `attn-dispatch`."""
    add_command(
        commands, "build-aiter", main, help=help, description=_DESCRIPTION, notes=_FILTER_HELP,
        examples=_EXAMPLES,
        options=(
            option("--arch", None,
                "gfx942 (MI300X, MI300A, MI325X) or gfx950 (MI350X, MI355X); may be repeated",
                required=True, choices=aiter_folder.ARCHS, dest="archs", action="append"),
            option("--aiter", "FOLDER",
                "build the ASM kernels of this AITER, a checkout of v0.1.15 or newer, or the "
                "folder where its wheel is installed", type=Path),
            option("--aiter-version", "VERSION", "its version, if the folder does not show it"),
            option("--filter", "TEXT", "only kernels with this in their name; see below"),
            option("--filter-forward", "PATTERN",
                "CK's own filter for forward kernels: a pattern for the whole name, or none"),
            option("--filter-split-kv", "PATTERN", "the same for forward kernels for serving"),
            option("--filter-backward", "PATTERN",
                "the same for backward kernels: BEFORE@AFTER@MAIN, a pattern for each kind"),
            option("--jobs", "N",
                "files to compile at once (default: one for each core, and for each 2 GB of "
                "memory)", type=at_least(1)),
            option("--out", "FOLDER",
                "where to make a folder for each architecture (default: $ATTN_DISPATCH_AITER, "
                "else a folder for your user, where attn_dispatch finds it)", type=Path),
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Build for each architecture. A failure ends the process with a message."""
    with ending_with_a_message():
        generation = asm_build.GENERATION if args.aiter else aiter_folder.GENERATION
        root = made_folder(args.out).resolve() if args.out else aiter_folder.root(generation)
        filters = Filters.parse(
            args.filter, args.filter_forward, args.filter_backward, args.filter_split_kv
        )
        jobs = args.jobs or default_jobs()
        if args.aiter_version and not args.aiter:
            raise BuildError(
                "--aiter-version: expected --aiter FOLDER as well, whose version it is"
            )
        if args.aiter:
            _refuse_filters(filters)
            sources = checkout.find(args.aiter.expanduser(), args.aiter_version)
            for arch in dict.fromkeys(args.archs):
                asm_build.build(sources, arch, root / arch, jobs)
            return
        for arch in dict.fromkeys(args.archs):
            build(arch, root / arch, filters, jobs)


def _refuse_filters(filters: Filters) -> None:
    if filters != Filters():
        raise BuildError("a filter chooses kernels of CK, and --aiter builds none: leave it out")


def build(arch: str, folder: Path, filters: Filters, jobs: int) -> None:
    """Generate, compile, link and install for one architecture."""
    started = time.monotonic()
    work = folder / "work"
    source_wheel = wheel.find()
    ninja.find_ninja()
    adapter = wheel.adapter_folder()
    tools = toolchain.find(arch, work)
    print(f"AITER {aiter_folder.GENERATION} for {arch} with {tools.description}")
    if tools.unknown_flags:
        print(f"  AITER's flags that this compiler lacks: {' '.join(tools.unknown_flags)}")
    if tools.compile_check_only:
        print("  compile check only: without ROCm's headers the result must not be run")

    with waiting("Generating the C++ files"):
        forward, backward = generate(source_wheel, arch, filters, work)
    environment = tuple(adapter / name for name in wheel.ENVIRONMENT)
    sources = (*wheel.adapter_sources(adapter, aiter_folder.GENERATION), *environment)
    print(_plan(forward, backward, len(sources) + 2 * len(environment), jobs))

    include = source_wheel.include_flags
    names = aiter_folder.libraries(arch)
    own_flags = wheel.environment_flags(arch)
    libraries = [
        Library(name, files, (*include, *options), needs, ninja.WRAPPED, own_flags)
        for name, files, options, needs in (
            (names[0], (*forward.files, *environment), flags.FORWARD, ()),
            (names[1], (*backward.files, *environment), flags.BACKWARD, ()),
            (names[2], sources, (*flags.FORWARD, f"-I{adapter}"), names[:2]),
        )
    ]
    ninja.write(work, tools, libraries)
    with progress.steps("Compiling") as report:
        ninja.run(work, jobs, report)

    files = sum(len(library.sources) for library in libraries)
    done = install.install(
        folder, tools, filters,
        generation=aiter_folder.GENERATION, version=source_wheel.version, arch=arch,
        libraries=names, kernels=source_wheel.asm(arch), files=files,
    )  # fmt: skip
    minutes = (time.monotonic() - started) / 60
    print(f"{folder}: {', '.join(names)} and {done.asm_kernels} ASM kernels; {minutes:.1f} minutes")
    print(f"  {work} is no longer needed, unless you want to add kernels later")


def _plan(forward: Sources, backward: Sources, adapter_files: int, jobs: int) -> str:
    """A line that says how many files will be built, and roughly how long that takes."""
    kernels = forward.kernels + backward.kernels
    others = len(forward.files) + len(backward.files) + adapter_files - kernels
    in_all = forward.kernels_in_all + backward.kernels_in_all + others
    minutes = (
        forward.kernels * _SECONDS["forward"]
        + backward.kernels * _SECONDS["backward"]
        + others * _SECONDS["other"]
    ) / (60 * jobs)
    duration = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.0f} minutes"
    return (
        f"  {kernels + others} of {in_all} files "
        f"({forward.kernels} of {forward.kernels_in_all} forward kernels, "
        f"{backward.kernels} of {backward.kernels_in_all} backward), "
        f"roughly {duration} with {jobs} jobs if nothing is built yet"
    )


def default_jobs() -> int:
    """The default of --jobs: one for each core of this process, as far as memory allows."""
    cores = len(os.sched_getaffinity(0))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(available[1]) * 1024 if available else 0
    return max(1, min(cores, free // _BYTES_PER_JOB))
