"""Speed of every option on one GPU: cuDNN compared with our XLA implementation in the same run.

usage: python benchmarks/options.py [--rounds N] [--out FOLDER]

Options that cuDNN lacks are expressed in other ways (a mask as a bias, a soft cap as nodes of the
graph, the gradient of lse as additional columns). The numbers show whether that is faster than XLA.
The calls have 2048 tokens, forward and backward with all gradients that both compute.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from timing import by_turns, median_ratio

from attn_dispatch import cudnn
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.reports.environment import environment
from attn_dispatch_tools.verify.calls import CaseProgram
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Packed, case

_SIZE: dict[str, Any] = {"b": 4, "t": 2048, "s": 2048, "n": 16, "k": 4, "h": 128}
_FOUR_DOCUMENTS = Packed((((1, 0.4), (2, 0.1), (3, 0.3), (4, 0.15)),) * 4)

_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window": (256, 0)},
    "window of both sides": {"window": (256, 256)},
    "lengths": {"q_lengths": (1, 0.5, 0.25, 0.1), "kv_lengths": (1, 0.5, 0.25, 0.1), **CAUSAL},
    "lengths, bottom right": {
        "q_lengths": (0.5, 0.25, 0.25, 0.1), "kv_lengths": (1, 0.5, 0.25, 0.5), **BOTTOM_RIGHT,
    },
    "segment ids": {"packed": _FOUR_DOCUMENTS, "max_segments": 8, **CAUSAL},
    "mask [1, 1, T, S]": {"mask": "11ts"},
    "mask [B, 1, 1, S]": {"mask": "b11s"},
    "bias [1, N, T, S]": {"bias": "1nts", "bias_dtype": "same"},
    "bias [B, 1, 1, S]": {"bias": "b11s", "bias_dtype": "same"},
    "bias, float32": {"bias": "1nts"},
    "ALiBi": {"alibi": 1, **CAUSAL},
    "soft cap": {"soft_cap": 30.0, **CAUSAL},
    "sinks": {"sinks": 1, "window": (256, 0)},
    "dropout": {"dropout": 0.1, **CAUSAL},
    "lse gradient": {"lse_grad": True, **CAUSAL},
    "row maximum": {"needs_max": True, **CAUSAL},
    "deterministic": {"deterministic": True, **CAUSAL},
    "value dim 128 of 192": {"h": 192, "v": 128, **CAUSAL},
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(case(name, **(_SIZE | facts)) for name, facts in _OPTIONS.items())


def gradients_of(case: Case) -> tuple[str, ...]:
    """The operands of a case whose gradients cuDNN computes."""
    operands = case.operands() | case.cotangents()
    operands |= {
        "out": operands["out_grad"],
        "lse": jnp.zeros((case.b, case.n, case.t), jnp.float32),
    }

    def runs(names: tuple[str, ...]) -> bool:
        spec = spec_of(case.backward_options(names), operands)
        return not cudnn.not_supported_reasons(spec, default_device())

    return tuple(name for name in case.differentiable if runs((name,)))


def measure(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """By direction, the times of both in microseconds, and XLA's time over cuDNN's."""
    operands = {x: jnp.asarray(y) for x, y in (case.operands() | case.cotangents()).items()}
    row: dict[str, Any] = {}
    for direction, gradients in (("forward", ()), ("forward_backward", gradients_of(case))):
        programs = {
            name: (jax.jit(CaseProgram.of(case, (name,), gradients).run), (operands,))
            for name in ("cudnn", "xla")
        }
        times = by_turns(programs, rounds, seconds)
        row[direction] = {
            "gradients": gradients,
            "cudnn_us": 1e6 * statistics.median(times["cudnn"]),
            "xla_us": 1e6 * statistics.median(times["xla"]),
            "ratio": median_ratio(times, "xla", "cudnn"),
        }
    return row


def main() -> None:
    args = arguments("Speed of every option, cuDNN against XLA.", rounds=3, seconds=0.05)
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}; XLA's time over cuDNN's")
    rows = {}
    for option in CASES:
        rows[option.name] = row = measure(option, args.rounds, args.seconds)
        cells = [
            f"{row[x]['cudnn_us']:8.0f} us {row[x]['ratio']:6.1f} x"
            for x in ("forward", "forward_backward")
        ]
        print(f"{option.name:24s}{'   '.join(cells)}", flush=True)
    report = {"environment": facts, "shape": _SIZE, "options": rows}
    save("options", report, args.out)


if __name__ == "__main__":
    main()
