"""How long the GPU runs kernels during a function, and what the host launches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from attn_dispatch_tools.bench.device_time import busy_in


def profiled(run: Callable[[], object]) -> dict[str, Any]:
    """The seconds for which kernels ran, the number of kernels, and the host's launches of graphs
    and kernels. If the profiler fails, only the reason."""
    try:
        return _profiled(run)
    except Exception as error:  # the profiler may raise anything; only these numbers are missing
        return {"reason": f"the profiler failed: {error}"[:300]}


def _profiled(run: Callable[[], object]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 1
        options.python_tracer_level = 0
        started = time.perf_counter()
        with jax.profiler.trace(folder, profiler_options=options):
            started = time.perf_counter()
            run()
            wall = time.perf_counter() - started
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        found: dict[str, Any] = {"profiled_wall_seconds": wall}
        names: dict[str, int] = {}
        for plane in data.planes:
            if plane.name.startswith("/device:GPU"):
                busy, reason = busy_in(plane.lines)
                found |= {"busy_seconds": busy, "reason": reason}
                found["kernels"] = sum(
                    1 for x in plane.lines if x.name.startswith("Stream") for _ in x.events
                )
            else:
                for line in plane.lines:
                    for event in line.events:
                        if "Launch" in event.name or "ommand" in event.name:
                            names[event.name] = names.get(event.name, 0) + 1
        found["launches"] = dict(sorted(names.items(), key=lambda x: -x[1])[:12])
    return found
