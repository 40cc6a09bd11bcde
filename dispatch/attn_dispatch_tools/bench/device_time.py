"""The time for which a device is busy with a program, from JAX's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax


def busy_seconds(run: Callable[[], object]) -> tuple[float | None, str]:
    """The seconds for which a GPU worked during `run`, which must wait for its results.

    Returns None and the reason if that is not known; never raises.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.host_tracer_level = 0
            options.python_tracer_level = 0
            with jax.profiler.trace(folder, profiler_options=options):
                run()
            return _read(Path(folder))
    except Exception as error:
        # The profiler may raise anything, for example if the driver refuses it. Then only this
        # number is missing.
        return None, f"the profiler failed: {_first_line(error)}"


def _read(folder: Path) -> tuple[float | None, str]:
    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        return None, "the profiler wrote nothing"
    data = jax.profiler.ProfileData.from_file(str(found[0]))
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    if not planes:
        return None, "the profile has no GPU"
    return busy_in(planes[0].lines)


def busy_in(lines: Iterable[Any]) -> tuple[float | None, str]:
    """The seconds for which at least one stream worked; kernels on several lines count once."""
    spans = {line.name: [(x.start_ns, x.end_ns) for x in line.events] for line in lines}
    streams = [x for name, found in spans.items() if name.startswith("Stream") for x in found]
    if not streams:
        # A later version may name the lines otherwise: then the busiest line counts.
        streams = max(spans.values(), key=_covered, default=[])
    if not streams:
        return None, "the profile has no kernels"
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
