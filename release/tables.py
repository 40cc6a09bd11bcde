"""Writes the tables of release/README.md from release/results.

usage: python release/tables.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from commands import COMMANDS
from commands import KEPT as TRIED
from containers import KEPT as CONTAINERS
from containers import dockerfiles, name_of
from install_lines import KEPT as LINES
from install_lines import lines
from plugins import PLUGINS, PYTHONS, REPOSITORY
from record import RESULTS, read

CHECKED = RESULTS / "release_check.json"
_BEFORE, _AFTER = "<!-- {} -->\n", "<!-- end of {} -->\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in lines)


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _cell(rows: list[dict[str, Any]]) -> str:
    """The outcome, time and size of one row."""
    if not rows:
        return "not run"
    (row,) = rows
    if row["state"] != "ok":
        return row["state"]
    return ", ".join(x for x in (_time(row["seconds"]), row["size"] and _size(row["size"])) if x)


def checked() -> str:
    """The results of `make release-check` for each version of Python."""
    facts = read(CHECKED)
    rows = facts["rows"]

    def line(what: str, part: str, jax: str = "") -> list[str]:
        found = [
            [x for x in rows if (x["part"], x["python"], x["jax"]) == (part, python, jax)]
            for python in PYTHONS
        ]
        return [what, *map(_cell, found)]

    def newest(python: str) -> str:
        outputs = [x["output"] for x in rows if x["python"] == python and x["jax"] == "jax"]
        return outputs[0].split(";")[0].removeprefix("jax ") if outputs else "not run"

    (oldest,) = {x["jax"] for x in rows if x["jax"].startswith("jax==")}
    table = [line("compiling", "libraries")]
    table += [line(f"wheel {x.name}", f"{x.name}, wheel") for x in PLUGINS]
    names = ["attn-dispatch", *(x.name for x in PLUGINS)]
    table += [line(f"{x} on JAX {oldest.removeprefix('jax==')}", x, oldest) for x in names]
    table.append(["the newest JAX for that Python", *map(newest, PYTHONS)])
    table += [line(f"{x} on it", x, "jax") for x in names]
    source = [x for x in rows if x["part"] == "source distribution, with the CUDA library"]
    pure = [_cell([x for x in rows if x["part"] == f"attn-dispatch, {y}"])
            for y in ("source distribution", "wheel")]  # fmt: skip
    alone = [x for x in rows if x["part"] == "source distribution, as pip builds it"]
    heading = (
        f"Begun {facts['begun']} at commit {facts['commit'][:7]}, on {facts['cores']} cores with"
        f" other work as well, {facts['libc']}. The source\ndistribution took {pure[0]}; the wheel"
        f" attn-dispatch {pure[1]}; installing the source distribution:\n"
        f"{_cell(alone)}; with the CUDA library: "
        f"{_cell(source)}. Sizes are of the wheel, or of the whole environment.\n\n"
    )
    return heading + _table(["", *(f"CPython {x}" for x in PYTHONS)], table)


def install_lines() -> str:
    """The time of each install line, and the size of the environment afterwards."""
    kept = read(LINES)
    rows = [_line_row(line, kept.get(line)) for line in lines()]
    return _table(["line", "CPython", "JAX", "time", "CPU time", "environment", "on"], rows)


def commands() -> str:
    """The times of the README's commands in a fresh checkout, including their environments."""
    kept = read(TRIED) if TRIED.exists() else {}
    rows = []
    for name in COMMANDS:
        if x := kept.get(name):
            took = _time(x["seconds"]) if x["state"] == "ok" else "fails"
            facts = [x["python"], took, _time(x["cpu_seconds"]), _size(x["size"]), x["date"]]
        else:
            facts = ["", "not run yet", "", "", ""]
        rows.append([f"`make {name}`", *facts])
    return _table(["command", "CPython", "time", "CPU time", "environment", "on"], rows)


def containers() -> str:
    """The time and size of each Dockerfile's image."""
    kept = read(CONTAINERS) if CONTAINERS.exists() else {}
    rows = []
    for name in map(name_of, dockerfiles()):
        if x := kept.get(name):
            rows.append([f"`{name}`", x["base"], _time(x["seconds"]), x["size"], x["date"]])
        else:
            rows.append([f"`{name}`", "", "not built yet", "", ""])
    return _table(["the image with", "base", "time", "size", "on"], rows)


def _line_row(line: str, kept: dict[str, Any] | None) -> list[str]:
    if kept is None:
        return [f"`{line}`", "", "", "not run yet", "", "", ""]
    took = _time(kept["seconds"]) if kept["state"] == "ok" else "fails"
    used = kept.get("cpu_seconds")
    cpu = "not kept" if used is None else _time(used)
    facts = [kept["python"], kept["jax"] or "none", took, cpu, _size(kept["size"]), kept["date"]]
    return [f"`{line}`", *facts]


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name of the comments around them."""
    return {
        REPOSITORY / "release" / "README.md": {
            "release check": checked(),
            "containers": containers(),
            "install lines": install_lines(),
            "commands": commands(),
        },
    }


def page(text: str, marked: dict[str, str]) -> str:
    """The text of a page with these tables."""
    for mark, table in marked.items():
        begin, end = _BEFORE.format(mark), _AFTER.format(mark)
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + table + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    for path, marked in tables().items():
        path.write_text(page(path.read_text("utf-8"), marked), "utf-8")
