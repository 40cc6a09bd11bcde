"""What a run found, as JSON; the table and the plots are made from nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_dispatch.files import reading, writing
from attn_dispatch_tools.bench.cells import Cell

_MOST_BYTES = 2**27
_SAME = ("device", "driver", "cudnn", "jax")


@dataclass
class CellResults:
    """Of one cell: by direction and the peer's name, what `measure.measure` returns."""

    cell: Cell
    results: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def value(self, direction: str, peer: str, *keys: str) -> float | None:
        """A number that was measured, or None: value("forward", "ours", "wall_us", "median")."""
        found: Any = self.results.get(direction, {}).get(peer, {})
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, int | float) else None


@dataclass
class Report:
    """environment: as `reports.environment` has it, with "peers": versions, "absent": reasons.

    stopped is empty, "time limit" or "interrupted"; then not_measured names the cells left.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    cells: list[CellResults] = field(default_factory=list)
    stopped: str = ""
    not_measured: list[str] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """Everyone that has a number somewhere, in the order in which they were asked."""
        names: dict[str, None] = {}
        for x in self.cells:
            for results in x.results.values():
                names |= dict.fromkeys(n for n, row in results.items() if "wall_us" in row)
        order = [*self.environment.get("peers", {})]
        return sorted(names, key=lambda x: order.index(x) if x in order else len(order))

    def write(self, path: Path) -> None:
        """Whole or not at all: a run may be ended while it writes."""
        data = {
            "environment": self.environment,
            "options": self.options,
            "stopped": self.stopped,
            "not_measured": self.not_measured,
            "cells": [
                x.cell.to_json() | {"notes": x.notes, "results": x.results} for x in self.cells
            ],
        }
        writing.replace(path, (json.dumps(data, indent=1) + "\n").encode())


def read(paths: Sequence[Path]) -> Report:
    """The cells of several files together; of a cell that two have, the later file's.

    Raises:
      ValueError: a file is not such a report, or was made on another device or with other versions.
    """
    found: Report | None = None
    cells: dict[tuple[str, str], CellResults] = {}
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
        for key in ("peers", "absent"):
            found.environment[key] = found.environment[key] | one.environment[key]
        for x in one.cells:
            cells[x.cell.grid, x.cell.name] = x
    if found is None:
        raise ValueError("expected the JSON file of a run, got none")
    found.cells = list(cells.values())
    return found


def _read(path: Path) -> Report:
    try:
        data = reading.json_file(path, _MOST_BYTES)
        cells = [CellResults(Cell.from_json(x), x["results"], x["notes"]) for x in data["cells"]]
        environment = {"peers": {}, "absent": {}} | data["environment"]
        return Report(environment, data["options"], cells, data["stopped"], data["not_measured"])
    except OSError as error:
        raise ValueError(f"expected a JSON file, got {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the JSON file of `attn-dispatch bench`, got {path} ({error!r})"
        ) from None
