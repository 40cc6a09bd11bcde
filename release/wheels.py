"""Packs compiled libraries into wheels, and builds the pure wheel and the source distribution."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import native
from environments import Failed
from plugins import BUILD, DIST, PLATFORM, REPOSITORY, VERSION, Plugin

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "{description}"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE", "licenses/*"]
requires-python = ">={python},<{next_python}"
dependencies = {dependencies}

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
artifacts = ["*.so"]

[tool.hatch.build.targets.wheel.hooks.custom]
"""

_README = """\
# {name}

{description} It belongs to the package attn-dispatch {version}, which finds it when it is
installed. There is nothing in it to import.
"""

_INIT = '''\
"""{description} attn_dispatch finds it when it is installed."""

__version__ = "{version}"
'''


def plugin_wheel(plugin: Plugin, version: str) -> Path:
    """Build a plugin's wheel for this version of Python from the libraries compiled for it."""
    stage = BUILD / "stage" / f"{plugin.suffix}-{version}"
    shutil.rmtree(stage, ignore_errors=True)
    package = stage / plugin.package
    package.mkdir(parents=True)
    major, minor = version.split(".")
    facts = {
        "name": plugin.name,
        "package": plugin.package,
        "version": VERSION,
        "description": plugin.description,
        "python": version,
        "next_python": f"{major}.{int(minor) + 1}",
        "dependencies": json.dumps([f"attn-dispatch=={VERSION}", *plugin.requires]),
    }
    (stage / "pyproject.toml").write_text(_PYPROJECT.format(**facts))
    (stage / "README.md").write_text(_README.format(**facts))
    (package / "__init__.py").write_text(_INIT.format(**facts))
    shutil.copy(REPOSITORY / "LICENSE", stage)
    shutil.copytree(native.licenses(), stage / "licenses")
    shutil.copy(Path(__file__).parent / "plugin" / "hatch_build.py", stage)
    for path in native.compiled(version).iterdir():
        if path.name.startswith(f"{plugin.library}."):
            shutil.copy(path, package)
        elif path.name.startswith("libattn_dispatch_no_") and plugin.library == "_cuda":
            shutil.copy(path, package)
        elif path.is_dir() and plugin.library == "_rocm":
            shutil.copytree(path, package / path.name)  # AITER's adapter, for build-aiter
    tag = f"cp{major}{minor}-cp{major}{minor}-{PLATFORM}"
    return _built("--wheel", stage, {"ATTN_RELEASE_TAG": tag})


def source_distribution() -> Path:
    return _built("--sdist", REPOSITORY, {})


def pure_wheel() -> Path:
    """Build the wheel of attn-dispatch, which has no compiled code.

    It is built from the source distribution, so that no stray file of the checkout gets into it.
    """
    (sdist,) = DIST.glob("*.tar.gz")
    unpacked = BUILD / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return _built("--wheel", source, {})


def _built(what: str, source: Path, environment: dict[str, str]) -> Path:
    out = BUILD / "out"
    shutil.rmtree(out, ignore_errors=True)
    plain = {x: y for x, y in os.environ.items() if not x.startswith("ATTN_DISPATCH_")}
    command = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", str(out), source]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{source}: {done.stdout}{done.stderr}")
    (built,) = out.iterdir()
    DIST.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(built, DIST / built.name))
