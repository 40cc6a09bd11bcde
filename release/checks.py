"""Checks of wheels and source distributions: their names, contents and metadata."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from plugins import PLATFORM, PLUGINS, VERSION

_STRAY = re.compile(
    r"(^|/)(tests?|__pycache__|release|\.\w[^/]*)/|\.(pyc|o|a|orig|rej|tmp|log)$|~$"
)
_GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_x86_64")

PACKAGES = ("attn_dispatch/", "attn_dispatch_tools/")


def faults(path: Path) -> list[str]:
    """Everything that is wrong with a wheel or source distribution, as sentences."""
    found = _twine(path)
    if path.suffix != ".whl":
        return found + _source_distribution(path)
    with zipfile.ZipFile(path) as wheel:
        names = [x for x in wheel.namelist() if not x.endswith("/")]
        (metadata,) = (x for x in names if x.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(wheel.read(metadata))
    inside = [x for x in names if ".dist-info/" not in x]
    found += [f"stray file {x}" for x in inside if _STRAY.search(x)]
    if facts["Version"] != VERSION:
        found.append(f"version: expected {VERSION}, got {facts['Version']}")
    if not any(x.endswith("licenses/LICENSE") for x in names):
        found.append("LICENSE is missing")
    plugin = next((x for x in PLUGINS if path.name.startswith(f"{x.package}-")), None)
    if plugin is None:
        return found + _pure(path, inside)
    if f"attn-dispatch=={VERSION}" not in (facts.get_all("Requires-Dist") or []):
        found.append(f"it does not require attn-dispatch=={VERSION}")
    python = path.name.split("-")[2]
    library = f"{plugin.package}/{plugin.library}.cpython-{python[2:]}-x86_64-linux-gnu.so"
    if [x for x in inside if re.search(r"/_\w+\..*so$", x)] != [library]:
        found.append(f"expected the library {library}, got {inside}")
    allowed = re.compile(
        rf"{plugin.package}/(__init__\.py|_\w+\..*\.so|libattn_dispatch_no_\w+\.so"
        r"|rocm_backend/aiter_\w+\.(h|cc))$"
    )
    found += [f"unexpected file {x}" for x in inside if not allowed.match(x)]
    return found + _auditwheel(path)


def _pure(path: Path, inside: list[str]) -> list[str]:
    found = [f"compiled: {x}" for x in inside if x.endswith((".so", ".pyd", ".cc", ".h"))]
    if not path.name.endswith("-py3-none-any.whl"):
        found.append(f"expected a wheel for any Python, got {path.name}")
    wanted = ("attn_dispatch/py.typed", *(f"{x}__init__.py" for x in PACKAGES))
    found += [f"{x} is missing" for x in wanted if x not in inside]
    return found + [f"outside the packages: {x}" for x in inside if not x.startswith(PACKAGES)]


def _source_distribution(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = [x.name.partition("/")[2] for x in archive.getmembers() if x.isfile()]
    wanted = ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "cuda_backend/module.cc",
              "rocm_backend/module.cc", "common_backend/status.h",
              *(f"dispatch/{x}__init__.py" for x in PACKAGES))  # fmt: skip
    found = [f"{x} is missing" for x in wanted if x not in names]
    return found + [f"stray file {x}" for x in names if _STRAY.search(x) or x.endswith(".so")]


def _twine(path: Path) -> list[str]:
    done = _tool("twine", "check", "--strict", str(path))
    return [] if done.returncode == 0 else [f"twine: {done.stdout.strip()}"]


def _auditwheel(path: Path) -> list[str]:
    """A fault if the wheel needs a newer glibc than its name says, or libraries Linux may lack."""
    done = _tool("auditwheel", "show", str(path))
    output = " ".join(done.stdout.split())
    fits = re.search(r'platform tag: "(\w+)"', output)
    glibc = _GLIBC.match(fits[1]) if fits else None
    named = _GLIBC.match(PLATFORM)
    assert named is not None
    if glibc is None or tuple(map(int, glibc.groups())) > tuple(map(int, named.groups())):
        return [f"auditwheel: expected {PLATFORM} or older, got {fits[1] if fits else output}"]
    return []


def _tool(*command: str) -> subprocess.CompletedProcess[str]:
    name, *rest = command
    return subprocess.run(
        [Path(sys.executable).with_name(name), *rest], capture_output=True, text=True
    )
