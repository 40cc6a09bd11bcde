"""Device time of our call, compared with cuDNN's fastest plan for the same graph.

Needs nvidia-cudnn-frontend, NVIDIA's Python interface to cuDNN, with which this script plans the
same attention and builds every plan that cuDNN's heuristics propose (modes A and B). The fastest of
them, "raw", uses the same cuDNN, arrays and device as our call, but not XLA. bfloat16, 16,384
tokens, heads · head dim 2,048. Both take turns and are timed on the device by the profiler, or by
wall clock if the profile does not have raw's kernels. A ratio is raw's time over ours.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Script, normal

import attn_dispatch
from attn_dispatch.core.tuning.timing import orders
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch_tools.bench.device_time import busy_seconds

try:
    import cudnn
except ImportError as error:
    sys.exit(f"raw_cudnn.py needs nvidia-cudnn-frontend, before 1.30: {error}")

CELLS = {
    f"d{dim} {length} {'causal' if is_causal else 'full'}": (dim, length, is_causal)
    for dim, length, is_causal in itertools.product((128, 64, 256), (8192, 2048), (True, False))
}
"""Head dim, length, causal."""
TOKENS, WIDTH = 16384, 2048

_OURS = {"query": 1, "key": 2, "value": 3, "out": 4, "lse": 5, "out_grad": 6}
_GRADIENTS = {"dq": 7, "dk": 8, "dv": 9}
_UIDS = _OURS | _GRADIENTS


class Driver:
    """A CUDA stream in the primary context of the first device."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # 1: does not wait for stream 0
        self.stream = stream.value or 0

    def wait(self) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def _call(self, name: str, *operands: Any) -> None:
        if failure := getattr(self._cuda, name)(*operands):
            raise RuntimeError(f"{name} failed with CUDA error {failure}")


class RawPass:
    """One direction of one cell, with every plan that cuDNN's heuristics propose.

    Args:
      planned_for: what cuDNN plans for: a handle, or the properties of a device that is not here.
    """

    def __init__(
        self,
        query: jax.ShapeDtypeStruct,
        planned_for: Mapping[str, Any],
        *,
        is_causal: bool,
        has_lse: bool = False,
        is_backward: bool = False,
    ) -> None:
        builder = getattr(cudnn._pybind_module, "backend_graph", cudnn.pygraph)
        self._graph = graph = builder(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **planned_for,
        )
        self._handle = planned_for.get("handle")
        options: dict[str, Any] = {"attn_scale": 1 / math.sqrt(query.shape[-1])}
        if is_causal:
            options["diagonal_band_right_bound"] = 0
        if is_backward:
            names = ("query", "key", "value", "out", "out_grad", "lse")
            operands = [_tensor(graph, name, query.shape) for name in names]
            results = dict(zip(_GRADIENTS, graph.sdpa_backward(*operands, **options), strict=True))
        else:
            operands = [_tensor(graph, name, query.shape) for name in ("query", "key", "value")]
            out, lse = graph.sdpa(*operands, generate_stats=has_lse, **options)
            results = {"out": out} | ({"lse": lse} if has_lse else {})
        for name, tensor in results.items():
            dims, strides = _layout(name, query.shape)
            tensor.set_output(True).set_uid(_UIDS[name]).set_dim(dims).set_stride(strides)
            tensor.set_data_type(_dtype(name))
        self.names: dict[int, str] = {}
        self._build()
        sizes = (graph.get_workspace_size_plan_at_index(i) for i in self.names)
        self.workspace_bytes = max(sizes)

    def run(self, index: int, pointers: Mapping[str, int]) -> None:
        """Queue a plan on the handle's stream."""
        pack = {_UIDS[x]: pointer for x, pointer in pointers.items() if x in _UIDS}
        self._graph._execute_plan_at_index(pack, pointers["workspace"], index, self._handle)

    def _build(self) -> None:
        graph, modes = self._graph, cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.B])
        graph.check_support()
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
                continue  # cuDNN cannot build all that it proposes
            name = graph.get_plan_name_at_index(index)
            if name not in self.names.values():
                self.names[index] = name
        if not self.names:
            raise RuntimeError("none of cuDNN's proposals can be built")


def _layout(name: str, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The dims (batch, heads, rows, columns) of an array [B, T, N, H] or of lse [B, N, T], and its
    strides in that order."""
    batch, rows, heads, columns = shape
    if name == "lse":
        return [batch, heads, rows, 1], [heads * rows, rows, 1, 1]
    strides = [rows * heads * columns, columns, heads * columns, 1]
    return [batch, heads, rows, columns], strides


def _dtype(name: str) -> Any:
    return cudnn.data_type.FLOAT if name == "lse" else cudnn.data_type.BFLOAT16


def _tensor(graph: Any, name: str, shape: tuple[int, ...]) -> Any:
    dims, strides = _layout(name, shape)
    return graph.tensor(dim=dims, stride=strides, data_type=_dtype(name), uid=_UIDS[name])


class Raw:
    """One cell on cuDNN without this package: the fastest plans, and their results."""

    def __init__(self, driver: Driver, handle: int, arrays: list[jax.Array], *, is_causal: bool):
        query = arrays[0]
        self._driver = driver
        shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
        planned_for = {"handle": handle}
        self._passes = {
            "forward": RawPass(shape, planned_for, is_causal=is_causal),
            "forward with lse": RawPass(shape, planned_for, is_causal=is_causal, has_lse=True),
            "backward": RawPass(shape, planned_for, is_causal=is_causal, is_backward=True),
        }
        lse = jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
        workspace = max(x.workspace_bytes for x in self._passes.values())
        names = ("query", "key", "value", "out_grad")
        self.arrays: dict[str, jax.Array] = dict(zip(names, arrays, strict=True))
        self.arrays |= {"out": jnp.zeros_like(query), "lse": lse}
        self.arrays |= {name: jnp.zeros_like(query) for name in _GRADIENTS}
        self.arrays["workspace"] = jnp.zeros(max(workspace, 256), jnp.uint8)
        jax.block_until_ready(self.arrays)
        self._pointers = {name: x.unsafe_buffer_pointer() for name, x in self.arrays.items()}
        self.best: dict[str, int] = {}

    def find_best(self, calls: int) -> dict[str, dict[str, float]]:
        """The time of each plan of each pass, by name, in microseconds; `best` gets the fastest."""
        found: dict[str, dict[str, float]] = {}
        for name, one in self._passes.items():
            times = {i: wall_us(self._queued([(name, i)]), calls) for i in one.names}
            self.best[name] = min(times, key=times.__getitem__)
            found[name] = {one.names[i]: us for i, us in times.items()}
        return found

    def queued(self, direction: str) -> Callable[[int], None]:
        """A function that runs a direction a number of times by the fastest plans, and waits."""
        passes = ("forward",) if direction == "forward" else ("forward with lse", "backward")
        return self._queued([(name, self.best[name]) for name in passes])

    def _queued(self, steps: list[tuple[str, int]]) -> Callable[[int], None]:
        def run(calls: int) -> None:
            for _ in range(calls):
                for name, index in steps:
                    self._passes[name].run(index, self._pointers)
            self._driver.wait()

        return run


def ours(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    return attn_dispatch.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def programs(is_causal: bool) -> dict[str, Callable[..., Any]]:
    """Our jitted calls by direction, functions of (query, key, value, out_grad)."""

    def forward(q, k, v, out_grad):
        del out_grad
        return (ours(q, k, v, is_causal=is_causal),)

    def both(q, k, v, out_grad):
        out, pull = jax.vjp(lambda *x: ours(*x, is_causal=is_causal), q, k, v)
        return out, *pull(out_grad)

    return {"forward": jax.jit(forward), "forward_backward": jax.jit(both)}


def queued(function: Callable[..., Any], arrays: list[jax.Array]) -> Callable[[int], None]:
    def run(calls: int) -> None:
        result = None
        for _ in range(calls):
            result = function(*arrays)
        jax.block_until_ready(result)

    return run


def device_us(run: Callable[[int], None], calls: int) -> float:
    """Microseconds for which a call keeps the device busy; 0 if the profile does not have it."""
    run(2)
    seconds, _ = busy_seconds(lambda: run(calls))
    return 1e6 * (seconds or 0) / calls


def wall_us(run: Callable[[int], None], calls: int) -> float:
    """Microseconds of wall time per call, if calls are queued back to back."""
    run(2)
    start = time.perf_counter()
    run(calls)
    return 1e6 * (time.perf_counter() - start) / calls


def differences(found: tuple[jax.Array, ...], raw: Raw) -> dict[str, float]:
    """By result, the largest difference from raw's, as a share of the largest number."""
    rows = {}
    for name, x in zip(("out", *_GRADIENTS), found, strict=True):
        a, b = np.asarray(x, np.float32), np.asarray(raw.arrays[name], np.float32)
        rows[name] = float(np.abs(a - b).max() / np.abs(b).max())
    return rows


def measure(driver: Driver, handle: int, cell: tuple[int, int, bool], args: Any) -> dict[str, Any]:
    dim, length, is_causal = cell
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    arrays = normal(*(shape,) * 4)
    raw, mine = Raw(driver, handle, arrays, is_causal=is_causal), programs(is_causal)
    row: dict[str, Any] = {"shape": shape, "is_causal": is_causal, "plans_us": raw.find_best(20)}
    explanation = attn_dispatch.explain(*arrays[:3], is_causal=is_causal, implementation="cudnn")
    verdicts = {"forward": explanation.forward[0], "backward": explanation.backward[0]}
    row["our_plans"] = {name: x.plan and x.plan.engine for name, x in verdicts.items()}
    for direction, program in mine.items():
        runs = {"ours": queued(program, arrays), "raw": raw.queued(direction)}
        clock = device_us if device_us(runs["raw"], 3) else wall_us
        calls = max(5, int(1e6 * args.seconds / wall_us(runs["raw"], 5)))
        times: dict[str, list[float]] = {name: [] for name in runs}
        square = orders(len(runs))
        for index in range(args.rounds):
            for place in square[index % len(square)]:
                name = tuple(runs)[place]
                times[name].append(clock(runs[name], calls))
        ratios = sorted(x / y for x, y in zip(times["raw"], times["ours"], strict=True))
        row[direction] = {
            "clock": "profiler" if clock is device_us else "wall",
            **{f"{name}_us": statistics.median(x) for name, x in times.items()},
            "ratio": statistics.median(ratios),
            "ratio_range": [ratios[0], ratios[-1]],
        }
    # Raw has run the direction with gradients last, so all of its results are there.
    row["differences"] = differences(mine["forward_backward"](*arrays), raw)
    return row


def main() -> None:
    script = Script("raw_cudnn", __doc__, rounds=4, seconds=0.03)
    args = script.start(cudnn_frontend=cudnn.__version__)
    library = cudnn_library.find()
    if cudnn.backend_version() != library.version:
        sys.exit(
            f"raw_cudnn.py compares one cuDNN with itself: the frontend has loaded "
            f"{cudnn.backend_version()}, and this library {library.version} from {library.path}"
        )
    driver = Driver()
    # Depending on the frontend's version, create_handle returns an int or an object that holds one.
    handle = cudnn._pybind_module.create_handle()
    set_stream = getattr(cudnn._pybind_module, "_raw_set_stream", None) or cudnn.set_stream
    set_stream(handle, driver.stream)
    ratios: list[float] = []
    for name in script.chosen(CELLS):
        row = measure(driver, handle, CELLS[name], args)
        ratios += [row[x]["ratio"] for x in ("forward", "forward_backward")]
        script.keep("cells", name, row)
    print(f"least ratio {min(ratios):.3f}, median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
