"""The time for which a device is busy with a program, from JAX's profiler."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax


def busy_seconds(
    run: Callable[[], object], spans: list[tuple[float, float]] | None = None
) -> tuple[float | None, str]:
    """The seconds for which a GPU worked during `run`, which must wait for its results.

    Returns None and the reason if that is not known; never raises. The start and end of each
    kernel, in nanoseconds, are added to `spans`.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.host_tracer_level = 0
            options.python_tracer_level = 0
            with jax.profiler.trace(folder, profiler_options=options):
                run()
            return _read(Path(folder), [] if spans is None else spans)
    except Exception as error:
        # The profiler may raise anything, for example if the driver refuses it. Then only this
        # number is missing.
        return None, f"the profiler failed: {_first_line(error)}"


_PAUSE, _GAP = 3e-3, 1.5e-3
"""Seconds between the programs of `busy_seconds_of_each`, and of the gap by which they are told
apart."""


def busy_seconds_of_each(runs: Sequence[Callable[[], object]]) -> list[float] | None:
    """The seconds for which a GPU worked during each run, of one profile; None if not known.

    Starting the profiler takes longer than a short program, so all share one start.
    """

    def run_all() -> None:
        for run in runs:
            run()
            time.sleep(_PAUSE)

    spans: list[tuple[float, float]] = []
    if busy_seconds(run_all, spans)[0] is None:
        return None
    groups: list[list[tuple[float, float]]] = []
    for start, end in sorted(spans):
        if not groups or start - max(x for _, x in groups[-1]) > 1e9 * _GAP:
            groups.append([])
        groups[-1].append((start, end))
    return [_covered(x) / 1e9 for x in groups] if len(groups) == len(runs) else None


def _read(folder: Path, spans: list[tuple[float, float]]) -> tuple[float | None, str]:
    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        return None, "the profiler wrote nothing"
    data = jax.profiler.ProfileData.from_file(str(found[0]))
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    if not planes:
        return None, "the profile has no GPU"
    return busy_in(planes[0].lines, spans)


def busy_in(
    lines: Iterable[Any], found: list[tuple[float, float]] | None = None
) -> tuple[float | None, str]:
    """The seconds for which at least one stream worked; kernels on several lines count once."""
    spans = {line.name: [(x.start_ns, x.end_ns) for x in line.events] for line in lines}
    streams = [x for name, found in spans.items() if name.startswith("Stream") for x in found]
    if not streams:
        # A later version may name the lines otherwise: then the busiest line counts.
        streams = max(spans.values(), key=_covered, default=[])
    if not streams:
        return None, "the profile has no kernels"
    if found is not None:
        found += streams
    return _covered(streams) / 1e9, ""


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
