"""A library of AITER that cannot be used is refused with a sentence, and loads once it is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import aiter_emulated
from tests.support.emulator import build
from tests.support.subinterpreter import import_error


def load_error(path: str, arch: str = "gfx942", then: str = "") -> str:
    """The error of loading a library in a new process; empty if it loads.

    With `then` the first load must fail. That library then replaces the first and is loaded.
    """
    code = textwrap.dedent(
        """
        import os, sys
        from tests.support import aiter_emulated
        module = aiter_emulated.load_module(aiter_emulated.library())
        path, arch, then = sys.argv[1:]

        def error():
            try:
                module.load_aiter(path, arch)
            except RuntimeError as error:
                return str(error)
            return ""

        if then:
            assert error()
            os.replace(then, path)
        print(error())
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, path, arch, then]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_a_subinterpreter_cannot_import_the_handlers():
    found = import_error(aiter_emulated.NAME, aiter_emulated.library())
    assert "got a subinterpreter" in found


def test_a_library_that_does_not_exist_is_an_error():
    assert "cannot be loaded: /lost/lib.so" in load_error("/lost/lib.so")


def test_a_library_without_the_interface_is_an_error():
    assert "does not export attn_dispatch_aiter" in load_error("libc.so.6")


@pytest.mark.parametrize(
    ("version", "generation", "message"),
    [
        ("99", "dev18", "for version 99 of attn_dispatch's AITER interface and this is version"),
        ("ATTN_AITER_API_VERSION", "head", "generation head and this attn_dispatch works with"),
        ("ATTN_AITER_API_VERSION", "dev18", "is not linked with HIP (libamdhip64)"),
    ],
)  # fmt: skip
def test_a_library_of_another_version_or_without_hip_is_an_error(
    tmp_path, version, generation, message
):
    assert message in load_error(str(build_library(tmp_path, version, generation)))


def test_a_refused_library_loads_once_it_is_built_again(tmp_path):
    """The path is the same, under which the loader finds a library that is still open."""
    wrong, right = tmp_path / "lib.so", tmp_path / "right.so"
    shutil.copy(build_library(tmp_path, "99", "dev18"), wrong)
    shutil.copy(aiter_emulated.library(), right)
    assert load_error(str(wrong), then=str(right)) == ""


@pytest.mark.parametrize(
    ("arch", "message"),
    [("gfx942", "is not linked with HIP"), ("gfx950", "is AITER for gfx942, and this is gfx950")],
)
def test_a_library_for_another_architecture_is_an_error(tmp_path, arch, message):
    library = build_library(tmp_path, "ATTN_AITER_API_VERSION", "dev18")
    assert message in load_error(str(library), arch)


def build_library(folder: Path, version: str, generation: str) -> Path:
    """Build a library with the interface of AITER for gfx942 and no functions behind it."""
    source = folder / f"{generation}.cc"
    source.write_text(
        '#include "aiter_api.h"\n'
        f'static const AttnAiter served{{{version}, "{generation}", "gfx942"}};\n'
        'extern "C" __attribute__((visibility("default"))) '
        "const AttnAiter* attn_dispatch_aiter() { return &served; }\n"
    )
    flags = ["-Wno-missing-field-initializers"]
    return build.build(f"served_{version}_{generation}", [source], flags=flags)
