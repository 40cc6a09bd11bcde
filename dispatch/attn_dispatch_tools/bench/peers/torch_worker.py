"""PyTorch's attention, run in a separate process that does not import JAX.

Each line of stdin is a request, a JSON object; the answer is a line with another. The "do" of a
request is "prepare", which makes a program with an id; "seconds" or "device_seconds", which measure
a number of calls of that program; or "release", which frees all programs. If a request fails, the
answer has a "reason".
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

Facts: TypeAlias = "dict[str, Any]"
"""A request, an answer or a cell, as JSON has them."""
Attention: TypeAlias = "Callable[..., Any]"
"""A function of query, key and value, torch's tensors [B, heads, T, H]."""

_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


def main() -> None:
    # Libraries print to stdout. Redirect that to stderr, and keep the real stdout for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    programs: dict[str, Callable[[], object]] = {}

    def answer(data: Facts) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    answer(_about())
    for line in sys.stdin:
        try:
            answer(_done(json.loads(line), programs))
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            answer({"reason": f"{type(error).__name__}: {first}"[:300]})


def _about() -> Facts:
    try:
        import torch
    except Exception as error:
        return {"reason": f"cannot be imported: {error}"}
    if not torch.cuda.is_available():
        return {"reason": "torch sees no CUDA device"}
    return {"version": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"}


def _done(request: Facts, programs: dict[str, Callable[[], object]]) -> Facts:
    import torch

    if request["do"] == "release":
        programs.clear()
        torch.cuda.empty_cache()
        return {}
    if request["do"] == "prepare":
        programs[request["id"]], facts = _prepared(request)
        return facts
    run, calls = programs[request["id"]], request["calls"]
    run()
    torch.cuda.synchronize()
    if request["do"] == "seconds":
        return {"seconds": _seconds(run, calls)}
    return {"seconds": _busy_seconds(run, calls)}


def _prepared(request: Facts) -> tuple[Callable[[], object], Facts]:
    import torch

    cell, direction = request["cell"], request["direction"]
    lengths = [cell.get("queries", cell["seq_len"]), *[cell["seq_len"]] * 2]
    heads = (cell["num_heads"], cell["num_kv_heads"], cell["num_kv_heads"], cell["num_heads"])
    dims = (cell["head_dim"], cell["head_dim"], cell["head_dim_v"], cell["head_dim_v"])
    # [B, N, T, H] views of arrays [B, T, N, H], as a model's projections leave them.
    q, k, v, out_grad = (
        torch.randn(cell["batch"], t, n, h, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for t, n, h in zip([*lengths, lengths[0]], heads, dims, strict=True)
    )
    needs_grad = direction != "forward"
    for x in (q, k, v):
        x.requires_grad_(needs_grad)
    made, facts = _flex(cell) if request["backend"] == "flex" else _sdpa(cell, request["backend"])

    def attention():
        return made(q, k, v)

    if direction == "forward":

        def run() -> object:
            with torch.no_grad():
                return attention()

    elif direction == "backward":
        out = attention()

        def run() -> object:
            return torch.autograd.grad(out, (q, k, v), out_grad, retain_graph=True)

    else:

        def run() -> object:
            return torch.autograd.grad(attention(), (q, k, v), out_grad)

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    run()
    torch.cuda.synchronize()
    facts |= {
        "first_call_ms": {"total": 1e3 * (time.perf_counter() - start)},
        "memory_bytes": torch.cuda.max_memory_allocated() - before,
    }
    return run, facts


def _sdpa(cell: Facts, backend: str) -> tuple[Attention, Facts]:
    """scaled_dot_product_attention with one of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = {"is_causal": cell["is_causal"], **_grouped(cell)}

    def attention(*qkv: object) -> object:
        with sdpa_kernel(getattr(SDPBackend, _BACKENDS[backend])):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    return attention, {}


def _flex(cell: Facts) -> tuple[Attention, Facts]:
    """flex_attention, which compiles at the first call, and the time it took to list blocks."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Each mask compiles again. Beyond a limit torch would run them uncompiled, over all scores.
    torch._dynamo.reset()
    mask, tokens = _masks().Mask(**cell["mask"]), cell["seq_len"]
    sees = mask.function()
    groups = torch.tensor(mask.groups(tokens), device="cuda", dtype=torch.int32)

    def mask_mod(b: object, h: object, t: object, s: object) -> object:
        return sees(t, s, groups)

    torch.cuda.synchronize()
    start = time.perf_counter()
    blocks = create_block_mask(mask_mod, None, None, tokens, tokens, device="cuda")
    torch.cuda.synchronize()
    facts = {"block_mask_ms": 1e3 * (time.perf_counter() - start)}
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(*qkv: object) -> object:
        return compiled(*qkv, block_mask=blocks, **_grouped(cell))

    return attention, facts


def _grouped(cell: Facts) -> dict[str, bool]:
    return {"enable_gqa": True} if cell["num_heads"] != cell["num_kv_heads"] else {}


def _masks() -> Any:
    """masks.py, by its path: the Python that has torch need not have this package."""
    if "masks" not in sys.modules:
        path = Path(__file__).parents[1] / "masks.py"
        spec = importlib.util.spec_from_file_location("masks", path)
        assert spec is not None and spec.loader is not None
        sys.modules["masks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["masks"])
    return sys.modules["masks"]


def _seconds(run: Callable[[], object], calls: int) -> float:
    import torch

    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def _busy_seconds(run: Callable[[], object], calls: int) -> float:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        _seconds(run, calls)
    spans = sorted(
        (x.time_range.start, x.time_range.end)
        for x in found.events() or ()
        if x.device_type == DeviceType.CUDA
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:  # microseconds
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    if not total:
        raise RuntimeError("the profile has no kernels")
    return total / 1e6 / calls


if __name__ == "__main__":
    main()
