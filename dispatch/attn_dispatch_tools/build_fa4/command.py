"""The `attn-dispatch build-fa4` command."""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn_dispatch.console import waiting
from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch.text import in_units
from attn_dispatch_tools.build_fa4 import contents, environment, linking
from attn_dispatch_tools.build_fa4.compiling import compile_all, kept
from attn_dispatch_tools.build_fa4.hosts import HOSTS, Host, this_machine
from attn_dispatch_tools.build_fa4.sets import ARCHS, SETS, KernelSet, Variant
from attn_dispatch_tools.terminal.building import BuildError, ending_with_a_message
from attn_dispatch_tools.terminal.folder import made_folder
from attn_dispatch_tools.terminal.help import Commands, add_command, flag, option
from attn_dispatch_tools.terminal.number_arguments import at_least
from attn_dispatch_tools.terminal.progress import progress

_DESCRIPTION = f"""\
Compile FlashAttention-4's kernels for Hopper GPUs (H100, H200), or for B200, into one small
library, through which attn_dispatch runs calls with any mask. No GPU is needed, and nothing is
compiled later, for whatever mask.

The kernels' sources and their compiler are installed from {environment.SOURCES},
{" and ".join(environment.WIDE_SOURCES)} (head dims beyond 256), and
{environment.COMPILER}, into an environment of their own in the cache folder of your user. Their
licences are in these packages. NVIDIA's for the compiler permits its output on NVIDIA GPUs only.

With --mod, every chosen set for sm90 with head dims up to 256 is also compiled with a score_mod,
and with the derivative that JAX finds of it. Such kernels run the calls that do the same to their
scores, whoever wrote the mod: a soft cap and ALiBi also run as logits_soft_cap and alibi_slopes.
Values of arrays that a mod reads are not compiled: a call brings its own.

The library replaces the one that is there, with all its sets and mods; with --add they stay in it.

All sets take some 250 seconds of CPU time for each architecture, and as much with each mod. What
was compiled before is kept, so that linking it again takes seconds.
"""

_MOD_ARCHS = ("sm90",)

_EXAMPLES = (
    "attn-dispatch build-fa4",
    "attn-dispatch build-fa4 --set '*_d128_bfloat16' --out build",
    "attn-dispatch build-fa4 --arch sm90 --arch sm100",
    "attn-dispatch build-fa4 --add --mod 'attn_dispatch.mods:soft_cap(50)'",
)


def add_parser(commands: Commands, help: str) -> None:
    """Add `build-fa4` to the parser of `attn-dispatch`."""
    add_command(
        commands, "build-fa4", main, help=help, description=_DESCRIPTION, examples=_EXAMPLES,
        options=(
            option("--set", "NAME",
                "only sets with this name, with * for anything; may be repeated. The names are "
                + ", ".join(SETS), dest="sets", action="append"),
            option("--arch", None,
                f"compile for this architecture; may be repeated (default: {ARCHS[0]}). Kernels "
                "for sm100 (B200) have not run on a GPU yet", choices=ARCHS, action="append"),
            option("--mod", "MODULE:FUNCTION",
                "compile the sets for sm90 with this score_mod as well; may be repeated. FUNCTION "
                "is one of (score, b, n, t, s), or FUNCTION(ARGUMENTS) returns one",
                dest="mods", default=[], action="append"),
            flag("--add",
                "keep the sets, with and without mods, of the library that is there (default: the "
                "new library replaces it)"),
            option("--jobs", "N", "sets to compile at once (default: one for each core)",
                type=at_least(1)),
            option("--out", "FOLDER",
                f"where to put {fa4_folder.LIBRARY} (default: the file that {fa4_folder.VARIABLE} "
                "names, else one in a folder for your user, where attn_dispatch finds it)",
                type=Path),
            option("--host", None,
                "the machines that load the library (default: such as this one); for others, CC "
                "or PATH has a C compiler for them", choices=HOSTS),
            option("--python", "PATH",
                "the Python for the compiler's environment (default: this one, or one on PATH)"),
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Build the library. A failure ends the process with a message."""
    with ending_with_a_message():
        sets = with_mods(chosen(args.sets, args.arch), args.mods)
        host = HOSTS[args.host] if args.host else this_machine()
        library = _target(args.out, host)
        folder = made_folder(library.parent).resolve()
        before = _used_until_now(args.out, library)
        kept_sets = contents.read(before)
        if args.add:
            sets = contents.added(_known(kept_sets, before), sets)
        build(folder / library.name, sets, args.jobs or default_jobs(), args.python, host)
        if lost := contents.replaced(kept_sets, sets):
            print(lost)


def _target(out: Path | None, host: Host) -> Path:
    if out is not None:
        return out / fa4_folder.LIBRARY
    if not host.is_this_machine:
        raise ValueError(f"--host {host.name}: expected --out too, as this machine cannot load it")
    return fa4_folder.target()


def _used_until_now(out: Path | None, library: Path) -> Path:
    """The file in whose place the library is loaded: one at its place, or what a wheel brought."""
    return library if out is not None else fa4_folder.library()


def _known(sets: Sequence[KernelSet] | None, library: Path) -> Sequence[KernelSet]:
    if sets is None:
        raise BuildError(
            f"--add: the sets of {library} cannot be read; without --add it is replaced"
        )
    return sets


def build(
    library: Path,
    sets: Sequence[KernelSet],
    jobs: int,
    python: str | None = None,
    host: Host | None = None,
) -> None:
    """Install the compiler, compile what is not kept, and link the library."""
    started = time.monotonic()
    host = host or this_machine()
    host.compiler()  # its absence is an error before minutes of work
    if kind := fa4_folder.no_file(library):
        # As root, a move onto /dev/null would replace the device.
        raise BuildError(f"expected the name of a file, got {library}, {kind}")
    cache = fa4_folder.cache()
    compiled = [kept(cache, x, host) for x in sets]
    if missing := [x for x in compiled if not x.is_complete]:
        with waiting(f"Installing {', '.join(environment.PACKAGES)}"):
            inside = environment.made(cache, python)
        with progress("Compiling", len(missing), is_stderr=True) as shown:
            compile_all(missing, inside, jobs, shown.step)
    linking.link(compiled, library)
    size, seconds = in_units(library.stat().st_size), time.monotonic() - started
    print(f"{library}: {contents.title(sets)}, {size}; {seconds:.0f} seconds")


def chosen(
    patterns: Sequence[str] | None = None, archs: Sequence[str] | None = None
) -> list[KernelSet]:
    """The sets of the architectures that --arch names, and of these only what --set names."""
    found = {name: x for name, x in SETS.items() if x.arch in (archs or ARCHS[:1])}
    for pattern in patterns or ():
        if not fnmatch.filter(found, pattern):
            elsewhere = {x.arch for x in SETS.values() if fnmatch.fnmatchcase(x.name, pattern)}
            how = f", which needs --arch {min(elsewhere)}" if elsewhere else ""
            raise ValueError(f"--set: expected one of {', '.join(found)}, got {pattern!r}{how}")
    wanted = patterns or ("*",)
    return [x for name, x in found.items() if any(fnmatch.fnmatchcase(name, y) for y in wanted)]


def with_mods(sets: Sequence[KernelSet], mods: Sequence[str]) -> list[KernelSet]:
    """The sets, and each with each mod. Mods that do the same are compiled once."""
    variants = {x.digest: x for x in map(_variant, mods)}
    changeable = [x for x in sets if x.arch in _MOD_ARCHS and not x.is_wide]
    if mods and not changeable:
        raise ValueError(
            f"--mod: kernels take mods on {' and '.join(_MOD_ARCHS)} alone, up to head dim 256"
        )
    return [*sets, *(replace(x, variant=y) for y in variants.values() for x in changeable)]


def _variant(mod: str) -> Variant:
    # Imported here, as it imports JAX, without which wheels are built.
    from attn_dispatch_tools.build_fa4 import score_mods

    return score_mods.variant(mod)


def default_jobs() -> int:
    """The default of --jobs: the number of cores of this process."""
    return len(os.sched_getaffinity(0))
