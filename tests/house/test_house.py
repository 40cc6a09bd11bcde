"""The house: which folder may import which, and where JAX's private names are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attn_dispatch

PACKAGE = Path(attn_dispatch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The floors from top to bottom. What stands in the package's own folder is named by its file.
FLOORS = (
    (
        "__init__",
        "__main__",
        "api",
        "bench",
        "cli",
        "commands",
        "conformance",
        "face",
        "implementation",
        "integrations",
        "mods",
        "pictures",
        "one_call",
        "paged",
        "planning",
        "serving",
    ),
    ("core",),
    ("cudnn", "flash", "fa4", "aiter", "xla"),
    ("devices", "semantics"),
    ("call",),
    ("programs",),
    ("reason", "settings", "terminal", "warning", "_version"),
    ("files",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Rooms of one floor that know each other.
NEIGHBOURS = {(x, y) for x in FLOORS[0] for y in FLOORS[0]} | {("fa4", "flash")}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(room, dotted name) of everything that a file imports from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package == "attn_dispatch" and rest and rest[0] in FLOOR_OF:
                yield rest[0], name


def test_every_file_has_a_floor():
    assert {room_of(path) for path in FILES} == FLOOR_OF.keys()


def test_imports_go_down_only():
    found = []
    for path in FILES:
        room = room_of(path)
        for other, name in imported(ast.parse(path.read_text())):
            is_below = FLOOR_OF[other] > FLOOR_OF[room]
            if not is_below and other != room and (room, other) not in NEIGHBOURS:
                found.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert found == []


def test_semantics_imports_only_what_a_call_is():
    for path in (PACKAGE / "semantics").glob("*.py"):
        rooms = {room for room, _ in imported(ast.parse(path.read_text()))}
        assert rooms <= {"semantics", "call", "programs", "reason"}, path.name


_OF_ANY_VENDOR = ("core", "api", "one_call", "paged", "devices", "semantics", "call")


def test_only_the_choice_names_the_implementations():
    """The front end does not know a vendor; the command and the suite look at their libraries."""
    for path in FILES:
        if room_of(path) not in _OF_ANY_VENDOR:
            continue
        rooms = {room for room, _ in imported(ast.parse(path.read_text()))}
        if path.name not in ("consider.py", "select.py"):
            assert rooms.isdisjoint(("cudnn", "flash", "fa4", "aiter", "xla")), path.name


def test_private_names_of_jax_are_in_one_file():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            private = ("jax._src", "jax.interpreters", "jax.experimental")
            if any(name.startswith(private) for name in names):
                assert path.name == "jax_compat.py", f"{path.relative_to(PACKAGE)}: {names}"


def test_the_face_takes_its_arguments_by_name():
    for name in ("api", "paged"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
        assert not any(isinstance(x.func, ast.Name) and x.func.id == "locals" for x in calls)
