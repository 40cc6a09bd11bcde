"""Programs lowered for GPUs that are not there, partitioned by XLA's compiler for CPUs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jaxlib import xla_client


def partition(lowered: Any) -> None:
    """Let XLA partition a lowered program over all devices of the process.

    A CPU has none of our kernels, which XLA finds after it has partitioned the program.
    """
    devices = jax.devices()
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.arange(len(devices)).reshape(1, -1),
        backend=devices[0].client,
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    try:
        devices[0].client.compile_and_load(
            lowered.compiler_ir("stablehlo"), xla_client.DeviceList(tuple(devices)), options
        )
    except Exception as error:
        assert "handler registered for attn_dispatch_" in str(error), error
