"""The results of a run, as JSON. The table and the plots are made from these alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_dispatch.files import reading, writing
from attn_dispatch_tools.bench.cells import Cell

_MAX_BYTES = 2**27
_SAME = ("device", "driver", "cudnn", "jax")
"""The facts that must be equal in files which are read as one report."""


@dataclass
class CellResults:
    """The results of one cell: what `measure.measure` returns, by direction and peer name."""

    cell: Cell
    results: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def value(self, direction: str, peer: str, *keys: str) -> float | None:
        """A number, such as value("forward", "ours", "wall_us", "median"); None if not measured."""
        found: Any = self.results.get(direction, {}).get(peer, {})
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, int | float) else None

    def with_peers_of(self, later: CellResults) -> CellResults:
        """These results and those of a later run, which count where both have a peer."""
        directions = dict.fromkeys((*self.results, *later.results))
        results = {x: self.results.get(x, {}) | later.results.get(x, {}) for x in directions}
        return CellResults(self.cell, results, self.notes | later.notes)


@dataclass
class Report:
    """The results of all cells of a run, and how it was run."""

    environment: dict[str, Any]
    """The facts of `reports.environment`, the versions of "peers", and why others are "absent"."""
    options: dict[str, Any]
    cells: list[CellResults] = field(default_factory=list)
    stopped: str = ""
    """Why the run ended early: "time limit" or "interrupted"; empty if it did not."""
    not_measured: list[str] = field(default_factory=list)
    """The names of the cells that a stopped run left out."""

    @property
    def peers(self) -> list[str]:
        """The names of the peers that were timed in some cell, in the order of the run."""
        names: dict[str, None] = {}
        for x in self.cells:
            for results in x.results.values():
                names |= dict.fromkeys(n for n, row in results.items() if "wall_us" in row)
        order = [*self.environment.get("peers", {})]
        return sorted(names, key=lambda x: order.index(x) if x in order else len(order))

    def write(self, path: Path) -> None:
        """Write the report as JSON, completely or not at all, even if the process is killed.

        Each cell is a line of it.
        """
        facts = {
            "environment": self.environment,
            "options": self.options,
            "stopped": self.stopped,
            "not_measured": self.not_measured,
        }
        cells = [x.cell.to_json() | {"notes": x.notes, "results": x.results} for x in self.cells]
        lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in cells)
        text = f'{json.dumps(facts, indent=1)[:-2]},\n "cells": [\n{lines}\n]}}\n'
        writing.replace(path, text.encode())


def read(paths: Sequence[Path]) -> Report:
    """The reports of several files as one. If two files have the same cell, the later one counts.

    A cell with a mask has the peers of all files: each run compares them with dense attention. The
    environment has the commits of all files.

    Raises:
      ValueError: a file is not such a report, or was made on another device or with other versions.
    """
    found: Report | None = None
    cells: dict[tuple[str, str], CellResults] = {}
    commits: dict[str, None] = {}
    for path in paths:
        one = _read(path)
        found = found or one
        for name in _SAME:
            first, other = found.environment.get(name), one.environment.get(name)
            if first != other:
                raise ValueError(
                    f"expected reports of one machine: {paths[0].name} has {name} {first}, "
                    f"{path.name} has {other}"
                )
        commits[str(one.environment.get("commit"))] = None
        for key in ("peers", "absent"):
            found.environment[key] = found.environment[key] | one.environment[key]
        for x in one.cells:
            name = (x.cell.grid, x.cell.name)
            earlier = cells.get(name) if x.cell.mask is not None else None
            cells[name] = x if earlier is None else earlier.with_peers_of(x)
    if found is None:
        raise ValueError("expected the JSON file of a run, got none")
    found.cells = list(cells.values())
    found.environment["commit"] = ", ".join(commits)
    return found


def _read(path: Path) -> Report:
    try:
        data = reading.json_file(path, _MAX_BYTES)
        cells = [CellResults(Cell.from_json(x), x["results"], x["notes"]) for x in data["cells"]]
        environment = {"peers": {}, "absent": {}} | data["environment"]
        return Report(environment, data["options"], cells, data["stopped"], data["not_measured"])
    except OSError as error:
        raise ValueError(f"expected a JSON file, got {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the JSON file of `attn-dispatch bench`, got {path} ({error!r})"
        ) from None
