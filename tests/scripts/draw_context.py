"""Runs drawn calls whose sequences are spread over eight CPU devices, against one device.

usage: python -m tests.scripts.draw_context [--draws N] [--seed N] [--seconds S]

A call that no strategy can run must say so, which counts as refused. The exit status is 1 if a call
is wrong or fails.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
import warnings
from collections import Counter

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)

import jax

from attn_dispatch import AttentionShardingWarning
from tests.support.spread_calls import Case, measured
from tests.support.spread_draws import drawn

TOLERANCE = 1e-5
REFUSALS = ("no strategy can run", "no forward-mode", "only rings and halos with one batch dim")


def outcome(case: Case) -> tuple[str, str]:
    """ "right", "refused", "wrong" or "failed", and what is to be said of it."""
    try:
        found = measured(case)
    except NotImplementedError as error:
        is_meant = case.spread.has_argument and any(x in str(error) for x in REFUSALS)
        return ("refused" if is_meant else "failed"), str(error)
    except Exception:
        return "failed", traceback.format_exc(limit=-6)
    ways = "+".join(sorted({*found.strategies})) or "heads or batch"
    if found.error <= TOLERANCE:
        return "right", ways
    wrong = {x: f"{y:.1e}" for x, y in found.errors.items() if y > TOLERANCE}
    return "wrong", f"{ways}: {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", AttentionShardingWarning)
    started, counts = time.monotonic(), Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.draws):
        if time.monotonic() - started > arguments.seconds:
            break
        case = drawn(seed)
        kind, text = outcome(case)
        counts[kind if kind != "right" else f"right, {text}"] += 1
        if kind in ("wrong", "failed"):
            print(f"{kind}: seed {seed}: {case}\n{text}", flush=True)
        elif kind == "refused":
            print(f"refused: seed {seed}: {text[:160]}", flush=True)
        jax.clear_caches()
    print(dict(sorted(counts.items())), f"{time.monotonic() - started:.0f} s")
    raise SystemExit(any(counts[x] for x in ("wrong", "failed")))


if __name__ == "__main__":
    main()
