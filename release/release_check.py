"""Builds everything that is released, checks it, installs it in fresh environments and tries it.

usage: python release/release_check.py [--pythons 3.12 3.13] [--skip-build] [--skip-trial] …

`make release-check` and `make wheels` run it. The files are built into build/release/dist. The exit
status is 1 if anything is wrong. Pythons that this machine lacks are reported and left out.
`--keep` writes the measurements into release/results, from which tables.py makes the tables of the
docs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import checks
import native
import wheels
from environments import Environment, Failed, cudnn, run
from plugins import BUILD, DIST, OLDEST_JAX, PLUGINS, PYTHONS, Plugin
from record import RESULTS, Outcome, Record, size_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, choices=PYTHONS)
    parser.add_argument("--skip-source", action="store_true", help="do not install from the sdist")
    parser.add_argument("--skip-trial", action="store_true", help="only build and check")
    parser.add_argument("--skip-build", action="store_true", help="try what was built earlier")
    parser.add_argument("--keep", action="store_true", help="write results/release_check.json")
    args = parser.parse_args()
    table = Record((RESULTS if args.keep else BUILD) / "release_check.json")
    pythons = {}
    for version in args.pythons:
        if python := native.interpreter(version):
            pythons[version] = python
        else:
            table.leave_out(f"CPython {version}", "no such interpreter on this machine")
    plugins = tuple(x for x in PLUGINS if _can_compile(x, table))
    if not args.skip_build:
        shutil.rmtree(DIST, ignore_errors=True)
        build(table, pythons, plugins)
    for version, python in () if args.skip_trial else pythons.items():
        for jax in (f"jax=={OLDEST_JAX}", "jax"):
            try_wheels(table, version, python, jax, plugins)
    if not args.skip_source and pythons:
        version, python = next(iter(pythons.items()))
        pure = partial(pure_from_source, version, python)
        table.add("source distribution, as pip builds it", pure, version)
        build_it = partial(from_source, version, python)
        table.add("source distribution, with the CUDA library", build_it, version, OLDEST_JAX)
    sys.exit(table.is_wrong)


def _can_compile(plugin: Plugin, table: Record) -> bool:
    roots = (*filter(None, [os.environ.get("ROCM_PATH")]), "/opt/rocm", "/usr")
    hip = any(Path(x, "include/hip/hip_runtime_api.h").exists() for x in roots)
    if plugin.library == "_rocm" and not hip:
        table.leave_out(plugin.name, "needs HIP's headers (Debian: libamdhip64-dev)")
        return False
    return True


def build(table: Record, pythons: dict[str, Path], plugins: tuple[Plugin, ...]) -> None:
    """Build and check every file that is released."""
    switches = tuple(dict.fromkeys(x.switch for x in plugins))
    table.add("attn-dispatch, source distribution", lambda: _checked(wheels.source_distribution()))
    table.add("attn-dispatch, wheel", lambda: _checked(wheels.pure_wheel()))
    for version, python in pythons.items():
        compile_libraries = partial(native.compile_for, python, version, switches)
        if not table.add("libraries", lambda do=compile_libraries: Outcome(do()), version):
            continue
        for plugin in plugins:
            wheel = partial(wheels.plugin_wheel, plugin, version)
            table.add(f"{plugin.name}, wheel", lambda wheel=wheel: _checked(wheel()), version)


def _checked(built: Path) -> Outcome:
    if faults := checks.faults(built):
        raise Failed(f"{built.name}: " + "; ".join(faults))
    return Outcome(size=built.stat().st_size)


def try_wheels(
    table: Record, version: str, python: Path, jax: str, plugins: tuple[Plugin, ...]
) -> None:
    """Try all wheels in one environment, into which each plugin is installed in turn."""
    here = Environment(f"{version}-{jax}")
    if table.add("attn-dispatch", lambda: _pure(here, python, jax), version, jax):
        for plugin in plugins:
            table.add(plugin.name, partial(_with_plugin, here, plugin, jax), version, jax)
    here.remove()


def _pure(here: Environment, python: Path, jax: str) -> Outcome:
    here.create(python, jax)
    here.install("attn-dispatch")
    size = size_of(here.folder)
    return Outcome(f"jax {here.version('jax')}; {here.smoke('none')}", size)


def _with_plugin(here: Environment, plugin: Plugin, jax: str) -> Outcome:
    here.install("attn-dispatch", plugin.name)
    if plugin.library == "_rocm":
        return Outcome(_rocm(here), size_of(here.folder))
    output = here.smoke(plugin.package, cudnn(int(plugin.suffix[-2:])))
    size = size_of(here.folder)
    here.uninstall(plugin.name)
    return Outcome(f"{output}; with its requirements {here.resolve(plugin, jax)} packages", size)


def _rocm(environment: Environment) -> str:
    code = (
        "from attn_dispatch.aiter import library\n"
        "from attn_dispatch_tools.build_aiter import wheel\n"
        "reason = library.find('gfx942').unusable_reason\n"
        "assert reason.startswith('AITER is not built for gfx942'), reason\n"
        "wheel.adapter_folder()"
    )
    run(environment.python, "-c", code, cwd=environment.folder)
    return "loads, and brings AITER's adapter"


def pure_from_source(version: str, python: Path) -> Outcome:
    """Install the source distribution as a user would, with pip's isolated build, and try it."""
    environment = Environment(f"{version}-pure-source")
    environment.create(python)
    (sdist,) = DIST.glob("*.tar.gz")
    environment.pip(sdist)
    output, size = environment.smoke("none"), size_of(environment.folder)
    environment.remove()
    return Outcome(output, size)


def from_source(version: str, python: Path) -> Outcome:
    """Install the source distribution with the CUDA library, using the headers and tools here."""
    environment = Environment(f"{version}-source")
    environment.create(python, f"jax=={OLDEST_JAX}")
    (sdist,) = DIST.glob("*.tar.gz")
    environment.pip("scikit-build-core>=1.0", "pybind11>=3.0", "cmake", "ninja")
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    switches = {"ATTN_DISPATCH_CUDA": "1", "PATH": path}
    environment.pip("--no-build-isolation", sdist, env=native.header_environment() | switches)
    output = environment.smoke("attn_dispatch", cudnn(13))
    size = size_of(environment.folder)
    environment.remove()
    return Outcome(output, size)


if __name__ == "__main__":
    main()
