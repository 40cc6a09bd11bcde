"""One of two processes with four CPU devices each: calls spread over all eight; prints errors.

usage: python -m tests.core.context.two_processes NUMBER PORT
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    )

import jax

from tests.support.spread_calls import Case, Spread, errors_in_every_process

CAUSAL = {"is_causal": True, "return_lse": True}
WINDOW = CAUSAL | {"local_window_size": (3, 0)}
ALONE, DATA = {"context": 8}, {"data": 2, "context": 4}
CASES = {
    "ring": Case(Spread(ALONE, strategy="ring"), further=("sinks",), options=CAUSAL),
    "ring in a shard_map": Case(
        Spread(DATA, manual=tuple(DATA), strategy="ring", order="zigzag"), batch=2, options=CAUSAL
    ),
    "gather": Case(Spread(ALONE, strategy="gather"), further=("bias",), options=CAUSAL),
    "halo": Case(Spread(ALONE, strategy="halo"), options=WINDOW),
    "heads": Case(
        Spread(ALONE, manual=tuple(ALONE), strategy="heads"), heads=8, kv_heads=8, options=CAUSAL
    ),
}


def main(number: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=number, initialization_timeout=60
    )
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    print(json.dumps({name: errors_in_every_process(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
