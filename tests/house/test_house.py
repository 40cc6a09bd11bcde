"""The house: which package and folder may import which, and where JAX's private names are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attn_dispatch
import attn_dispatch_tools

ENGINE = Path(attn_dispatch.__file__).parent
TOOLS = Path(attn_dispatch_tools.__file__).parent
HOUSE = ENGINE.parent

# The floors of each package from top to bottom. What stands in a package's own folder is named by
# its file.
FLOORS = {
    ENGINE: (
        (
            "__init__",
            "__main__",
            "api",
            "face",
            "implementation",
            "integrations",
            "mods",
            "one_call",
            "paged",
            "serving",
        ),
        ("core",),
        ("cudnn", "flash", "fa4", "aiter", "xla"),
        ("devices", "semantics"),
        ("call",),
        ("programs",),
        ("console", "reason", "settings", "text", "warning", "_version"),
        ("files",),
    ),
    TOOLS: (
        ("__init__", "__main__", "cli"),
        ("bench", "build_aiter", "commands", "pictures", "verify"),
        ("reports", "written_calls"),
        ("terminal",),
    ),
}
PACKAGES = tuple(FLOORS)
FILES = {package: sorted(package.rglob("*.py")) for package in PACKAGES}
FLOOR_OF = {
    package: {room: number for number, rooms in enumerate(floors) for room in rooms}
    for package, floors in FLOORS.items()
}

# Rooms of one floor that know each other.
NEIGHBOURS = {(x, y) for x in FLOORS[ENGINE][0] for y in FLOORS[ENGINE][0]} | {
    ("__main__", "cli"),
    ("fa4", "flash"),
}


def room_of(path: Path) -> str:
    package = ENGINE if path.is_relative_to(ENGINE) else TOOLS
    return path.relative_to(package).with_suffix("").parts[0]


def imported(tree: ast.AST, package: Path = ENGINE) -> Iterator[tuple[str, str]]:
    """(room, dotted name) of everything that a file imports from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == package.name and rest and rest[0] in FLOOR_OF[package]:
                yield rest[0], name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda x: x.name)
def test_every_file_has_a_floor(package: Path):
    assert {room_of(path) for path in FILES[package]} == FLOOR_OF[package].keys()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda x: x.name)
def test_imports_go_down_only(package: Path):
    found, floor_of = [], FLOOR_OF[package]
    for path in FILES[package]:
        room = room_of(path)
        for other, name in imported(ast.parse(path.read_text()), package):
            is_below = floor_of[other] > floor_of[room]
            if not is_below and other != room and (room, other) not in NEIGHBOURS:
                found.append(f"{path.relative_to(package)} imports {name}")
    assert found == []


def test_the_engine_does_without_the_tools():
    """Neither imported, at the top or within a function, nor named for importlib or `-m`."""
    named = [x for x in FILES[ENGINE] if TOOLS.name in x.read_text()]
    assert named == [ENGINE / "__main__.py"]
    rooms = {room for x in FILES[ENGINE] for room, _ in imported(ast.parse(x.read_text()))}
    assert "__main__" not in rooms


def test_the_engine_is_imported_without_the_tools():
    """All of it but what needs a framework, in a process in which the tools cannot be imported."""
    names = (x.relative_to(HOUSE).with_suffix("").parts for x in FILES[ENGINE])
    modules = [".".join(x) for x in names if "integrations" not in x and x[-1] != "__main__"]
    code = f"import sys\nsys.modules[{TOOLS.name!r}] = None\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_semantics_imports_only_what_a_call_is():
    for path in (ENGINE / "semantics").glob("*.py"):
        rooms = {room for room, _ in imported(ast.parse(path.read_text()))}
        assert rooms <= {"semantics", "call", "programs", "reason"}, path.name


_OF_ANY_VENDOR = ("core", "api", "one_call", "paged", "devices", "semantics", "call")


def test_only_the_choice_names_the_implementations():
    """The front end does not know a vendor; the command and the suite look at their libraries."""
    for path in FILES[ENGINE]:
        if room_of(path) not in _OF_ANY_VENDOR:
            continue
        rooms = {room for room, _ in imported(ast.parse(path.read_text()))}
        if path.name not in ("consider.py", "select.py"):
            assert rooms.isdisjoint(("cudnn", "flash", "fa4", "aiter", "xla")), path.name


def test_private_names_of_jax_are_in_one_file():
    for path in (*FILES[ENGINE], *FILES[TOOLS]):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            private = ("jax._src", "jax.interpreters", "jax.experimental")
            if any(name.startswith(private) for name in names):
                assert path.name == "jax_compat.py", f"{path.relative_to(HOUSE)}: {names}"


def test_the_face_takes_its_arguments_by_name():
    for name in ("api", "paged"):
        tree = ast.parse((ENGINE / f"{name}.py").read_text())
        calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
        assert not any(isinstance(x.func, ast.Name) and x.func.id == "locals" for x in calls)
