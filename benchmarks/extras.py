"""Speed of flash and of cuDNN on one GPU. Preferences are made from choices.py instead.

usage: python benchmarks/extras.py [--rounds N] [--seconds S] [--out FOLDER]

flash (dew-flash-attn) and cuDNN take turns at the same calls, forward and with all gradients, and
so does the default choice, whose backward pass may use another implementation than its forward
pass. For packed sequences the bare kernel, called with cu_seqlens only, is measured as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from timing import by_turns, median_ratio

from attn_dispatch import dot_product_attention, flash, ragged_dot_product_attention
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.reports.environment import environment

_CAUSAL: dict[str, Any] = {"is_causal": True}
_LENGTHS = np.random.default_rng(0).integers(200, 1800, 16)
_ENDS = np.cumsum(_LENGTHS)
_TOKENS = int(_ENDS[-1])
_CU = jnp.asarray([0, *_ENDS], jnp.int32)
_IDS = jnp.asarray(np.repeat([*range(1, 17), 0], [*_LENGTHS, 16384 - _TOKENS])[None], jnp.int32)


@dataclass(frozen=True)
class Cell:
    """The sizes and options of a call."""

    b: int
    t: int
    s: int
    n: int
    k: int
    h: int
    v: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ragged(self) -> bool:
        return "cu_seqlens_q" in self.options

    def arrays(self) -> list[jax.Array]:
        """query, key, value and the gradient of the output."""
        v = self.v or self.h
        shapes = ((self.t, self.n, self.h), (self.s, self.k, self.h), (self.s, self.k, v))
        keys = jax.random.split(jax.random.key(0), 4)
        return [
            jax.random.normal(key, shape if self.is_ragged else (self.b, *shape), jnp.bfloat16)
            for key, shape in zip(keys, (*shapes, (self.t, self.n, v)), strict=True)
        ]

    def call(self, implementation: str | None) -> Callable[..., jax.Array]:
        function = ragged_dot_product_attention if self.is_ragged else dot_product_attention
        return partial(function, implementation=implementation, **self.options)


def _square(b: int, t: int, n: int, k: int, h: int, v: int = 0, **options: Any) -> Cell:
    return Cell(b, t, t, n, k, h, v, _CAUSAL | options)


CELLS: dict[str, Cell] = {
    "d128 causal 8k, GQA": _square(2, 8192, 16, 4, 128),
    "d128 causal 8k": _square(2, 8192, 16, 16, 128),
    "d128 full 8k": Cell(2, 8192, 8192, 16, 16, 128),
    "d128 causal 2k": _square(8, 2048, 16, 16, 128),
    "d128 causal 512": _square(32, 512, 16, 16, 128),
    "d64 causal 8k": _square(2, 8192, 32, 32, 64),
    "d64 full 8k": Cell(2, 8192, 8192, 32, 32, 64),
    "d80 causal 8k": _square(2, 8192, 16, 16, 80),
    "d96 causal 8k": _square(2, 8192, 16, 16, 96),
    "d192 causal 8k": _square(2, 8192, 8, 8, 192),
    "192/128 causal 8k": _square(2, 8192, 8, 8, 192, 128),
    "d256 causal 8k": _square(2, 8192, 8, 8, 256),
    "d256 full 8k": Cell(2, 8192, 8192, 8, 8, 256),
    "window 1024 of 16k": _square(1, 16384, 16, 16, 128, local_window_size=(1023, 0)),
    "one small call": _square(1, 128, 8, 8, 64),
    "1 query, 8k keys": Cell(16, 1, 8192, 32, 8, 128),
    "16 queries, 8k keys": Cell(
        4, 16, 8192, 32, 8, 128, options=_CAUSAL | {"causal_alignment": "bottom_right"}
    ),
    "512 queries, 8k keys": Cell(
        1, 512, 8192, 32, 8, 128, options=_CAUSAL | {"causal_alignment": "bottom_right"}
    ),
    "ragged, 16 documents": Cell(
        1, _TOKENS, _TOKENS, 32, 8, 128,
        options=_CAUSAL | {"cu_seqlens_q": _CU, "cu_seqlens_kv": _CU, "max_seqlen_q": 4096,
                           "max_seqlen_kv": 4096},
    ),
    "segment ids, 16 in 16k": _square(
        1, 16384, 32, 8, 128, query_segment_ids=_IDS, max_segments=16, max_segment_len=4096
    ),
    "8 documents of 1k": _square(
        1, 8192, 16, 4, 128, query_segment_ids=jnp.arange(8192)[None] // 1024 + 1, max_segments=8,
        max_segment_len=1024,
    ),
    "lengths, 8 rows of 4k": _square(
        8, 4096, 16, 4, 128,
        **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"),
                        jnp.asarray(_LENGTHS[:8] * 2, jnp.int32)),
    ),
}  # fmt: skip


def bare_kernels(cu: jax.Array, longest: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlashAttention-3's kernels for causal packed sequences, with nothing before or after them.

    The first function returns out and lse from (q, k, v), the second the gradients from (out_grad,
    q, k, v, out, lse).

    Args:
      cu: cu_seqlens of queries and of keys.
      longest: the longest sequence.
    """

    def attributes(q: jax.Array) -> dict[str, Any]:
        return {
            "softmax_scale": np.float64(q.shape[-1] ** -0.5), "is_causal": True,
            "window_size_left": np.int64(-1), "window_size_right": np.int64(0),
            "max_seqlen": np.int64(longest), "max_seqlen_k": np.int64(longest),
        }  # fmt: skip

    def forward(q: jax.Array, k: jax.Array, v: jax.Array):
        flash.register()
        ones = [jax.ShapeDtypeStruct((1,) * n, jnp.float32) for n in (4, 3)]
        lse = jax.ShapeDtypeStruct((q.shape[1], len(q)), jnp.float32)
        results = [jax.ShapeDtypeStruct(q.shape, q.dtype), lse, *ones]
        run = jax.ffi.ffi_call("attn_dispatch_flash_forward_packed", results)
        return run(q, k, v, cu, cu, **attributes(q))[:2]

    def backward(out_grad: jax.Array, *residuals: jax.Array):
        q = residuals[0]
        rows = q.shape[1] * (len(q) + 128 * len(cu))
        scratch = jax.ShapeDtypeStruct((rows,), jnp.float32)
        grads = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals[:3]]
        run = jax.ffi.ffi_call("attn_dispatch_flash_backward_packed", [*grads, scratch, scratch])
        return run(out_grad, *residuals, cu, cu, **attributes(q))[:3]

    return forward, backward


def bare() -> dict[str, Callable[..., Any]]:
    """The bare kernels of the ragged cell, by direction."""
    forward, backward = bare_kernels(_CU, 4096)

    def both(out_grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array):
        return backward(out_grad, q, k, v, *forward(q, k, v))

    return {"forward": jax.jit(forward), "forward_backward": jax.jit(both)}


def measure(cell: Cell, rounds: int, seconds: float) -> dict[str, Any]:
    """By direction, the time of each call in us, and how many times as fast as cuDNN it is."""
    *given, out_grad = cell.arrays()
    made: dict[str, dict[str, Callable[..., Any]]] = {}
    for name in ("cudnn", "flash", None):
        call = cell.call(name)

        def gradients(out_grad: jax.Array, *given: jax.Array, call: Any = call):
            return jax.vjp(call, *given)[1](out_grad)

        made[name or "chosen"] = {
            "forward": jax.jit(call), "forward_backward": jax.jit(gradients)
        }  # fmt: skip
    if cell.is_ragged:
        made["bare"] = bare()
    row = {}
    for direction, first in (("forward", []), ("forward_backward", [out_grad])):
        programs = {name: (x[direction], [*first, *given]) for name, x in made.items()}
        times = by_turns(programs, rounds, seconds)
        row[direction] = {f"{name}_us": 1e6 * statistics.median(x) for name, x in times.items()}
        row[direction] |= {
            f"{name}_over_cudnn": median_ratio(times, "cudnn", name)
            for name in times
            if name != "cudnn"
        }
    return row


def main() -> None:
    args = arguments("Speed of flash and of cuDNN.", rounds=5, seconds=0.05)
    if unusable := flash.unusable_reason(default_device()):
        raise SystemExit(f"error: flash: {unusable}")
    facts = environment() | {"dew_flash_attn": str(flash.version())}
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    print(
        "us: cuDNN, flash; then how many times as fast as cuDNN: flash, the default choice, and, "
        "for packed sequences, the bare kernel"
    )
    rows = {}
    for name, cell in CELLS.items():
        rows[name] = row = measure(cell, args.rounds, args.seconds)
        cells = [
            f"{x['cudnn_us']:7.0f} {x['flash_us']:7.0f}"
            + "".join(f" {x[y]:5.2f}" for y in x if y.endswith("_over_cudnn"))
            for x in row.values()
        ]
        print(f"{name:24s}{'   '.join(cells)}", flush=True)
    save("extras", {"environment": facts, "calls": rows}, args.out)


if __name__ == "__main__":
    main()
