"""Builds everything that is released, checks it, installs it in fresh environments and tries it.

usage: python release/release_check.py [--pythons 3.12 3.13] [--skip-build] [--skip-trial] …

`make release-check` and `make wheels` run it. What it builds is in build/release/dist; it ends with
a table, and with status 1 if anything is wrong. Pythons that are not on this machine are named in
it and left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import checks
import native
import wheels
from environments import Environment, Failed, cudnn, run
from plugins import BUILD, DIST, OLDEST_JAX, PLUGINS, PYTHONS, Plugin

Row = tuple[str, str, str]
"""What was done, how it went, what there is to say of it."""


class Table:
    """The rows so far, each printed as it is known."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, what: str, task: Callable[[], str]) -> bool:
        """Do it; whether it went well."""
        start = time.monotonic()
        try:
            state, said = "ok", task()
        except Failed as failure:
            state, said = "WRONG", str(failure)
        took = f"{time.monotonic() - start:.0f} s"
        self.rows.append((what, state, f"{took}; {said}" if said else took))
        print(f"{state:<7} {what}: {self.rows[-1][2]}", flush=True)
        return state == "ok"

    def leave_out(self, what: str, why: str) -> None:
        self.rows.append((what, "left out", why))
        print(f"left out {what}: {why}", flush=True)

    def markdown(self) -> str:
        lines = ["| what | | |", "|---|---|---|"]
        lines += [
            f"| {what} | {state} | {said.splitlines()[0]} |" for what, state, said in self.rows
        ]
        return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, choices=PYTHONS)
    parser.add_argument("--skip-source", action="store_true", help="not to build from the sdist")
    parser.add_argument("--skip-trial", action="store_true", help="to build and check alone")
    parser.add_argument("--skip-build", action="store_true", help="to try what is built already")
    args = parser.parse_args()
    table = Table()
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
        table.add(
            "source distribution, with the CUDA library", lambda: from_source(version, python)
        )
    (BUILD / "report.md").write_text(table.markdown())
    print(f"\n{table.markdown()}")
    sys.exit(any(state == "WRONG" for _, state, _ in table.rows))


def _can_compile(plugin: Plugin, table: Table) -> bool:
    hip = any(Path(x, "include/hip/hip_runtime_api.h").exists() for x in ("/opt/rocm", "/usr"))
    if plugin.library == "_rocm" and not hip:
        table.leave_out(plugin.name, "needs HIP's headers (Debian: libamdhip64-dev)")
        return False
    return True


def build(table: Table, pythons: dict[str, Path], plugins: tuple[Plugin, ...]) -> None:
    """Every file that is released, and what is wrong with it."""
    switches = tuple(dict.fromkeys(x.switch for x in plugins))
    table.add("attn-dispatch, source distribution", lambda: _checked(wheels.source_distribution()))
    table.add("attn-dispatch, wheel", lambda: _checked(wheels.pure_wheel()))
    for version, python in pythons.items():
        compile_libraries = partial(native.compile_for, python, version, switches)
        if not table.add(f"libraries for CPython {version}", compile_libraries):
            continue
        for plugin in plugins:
            wheel = partial(wheels.plugin_wheel, plugin, version)
            table.add(f"{plugin.name}, wheel for {version}", lambda wheel=wheel: _checked(wheel()))


def _checked(built: Path) -> str:
    if wrong := checks.wrong(built):
        raise Failed(f"{built.name}: " + "; ".join(wrong))
    return f"{built.stat().st_size / 1e6:.2f} MB"


def try_wheels(
    table: Table, version: str, python: Path, jax: str, plugins: tuple[Plugin, ...]
) -> None:
    """One environment, into which each plugin is installed in turn, and out again."""
    here = Environment(f"{version}-{jax}")
    if table.add(f"CPython {version}, {jax}: attn-dispatch", lambda: _pure(here, python, jax)):
        for plugin in plugins:
            what = f"CPython {version}, {jax}: {plugin.name}"
            table.add(what, partial(_with_plugin, here, plugin, jax))
    here.remove()


def _pure(here: Environment, python: Path, jax: str) -> str:
    here.create(python, jax)
    here.install("attn-dispatch")
    return f"jax {here.version('jax')}; {here.smoke('none')}"


def _with_plugin(here: Environment, plugin: Plugin, jax: str) -> str:
    here.install("attn-dispatch", plugin.name)
    if plugin.library == "_rocm":
        return _rocm(here)
    said = here.smoke(plugin.package, cudnn(int(plugin.suffix[-2:])))
    here.uninstall(plugin.name)
    return f"{said}; with its requirements {here.resolve(plugin, jax)} packages"


def _rocm(environment: Environment) -> str:
    code = (
        "from attn_dispatch.aiter import library; from attn_dispatch.aiter.build import wheel\n"
        "said = library.find('gfx942').unusable\n"
        "assert said.startswith('AITER is not built for gfx942'), said\n"
        "wheel.adapter_folder()"
    )
    run(environment.python, "-c", code, cwd=environment.folder)
    return "loads, and brings AITER's adapter"


def from_source(version: str, python: Path) -> str:
    """The install line of the checkout, of the sdist: with headers and tools that are here."""
    environment = Environment(f"{version}-source")
    environment.create(python, f"jax=={OLDEST_JAX}")
    (sdist,) = DIST.glob("*.tar.gz")
    environment.pip("scikit-build-core>=1.0", "pybind11>=3.0", "cmake", "ninja")
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    switches = {"ATTN_DISPATCH_CUDA": "1", "PATH": path}
    environment.pip("--no-build-isolation", sdist, env=native.header_environment() | switches)
    said = environment.smoke("attn_dispatch", cudnn(13))
    environment.remove()
    return said


if __name__ == "__main__":
    main()
