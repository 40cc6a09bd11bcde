"""Training steps compiled for H100s that are not there, and the lists of them; prints JSON.

XLA compiles for GPUs that it only has a description of, if it finds JAX's CUDA plugin.

usage: compiled_programs.py FOLDER, with jax-cuda13-plugin and jax-cuda13-pjrt in it
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA's own libraries are not needed
sys.path.insert(0, sys.argv[1])

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.cpu import _lapack

from attn_dispatch import cudnn, explain_program, target
from tests.support.model_programs import PROGRAMS, ModelProgram
from tests.support.optimized_hlo import compiled, listed
from tests.support.present import present
from tests.support.program_lists import of_arrays

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
  clock_rate_ghz: 1.98
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""XLA's description of the device, a GpuTargetConfig."""


def register_without_cudnn() -> None:
    """Let XLA compile the custom calls without a GPU on which cuDNN could load plans.

    Any handler does, as the programs never run.
    """
    cudnn.register = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    handler = next(x for name, x in _lapack.registrations().items() if name.endswith("_ffi"))
    for name in (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET):
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


def optimized(program: ModelProgram, mesh: Mesh) -> str:
    """The optimized HLO of a program, for one device or for all of the mesh."""

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        found = getattr(x, "sharding", None)
        sharding = found if isinstance(found, NamedSharding) else NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    function, arrays = of_arrays(program.step, program.args)
    arrays = {i: placed(x) for i, x in arrays.items()}
    lowered = jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
    return present(lowered.compile().as_text())


def main() -> None:
    pair = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x2").devices
    one, two = (Mesh(np.array(x), ("data",), axis_types=(AxisType.Auto,)) for x in (pair[:1], pair))
    register_without_cudnn()
    report = {}
    for name, maker in PROGRAMS.items():
        if any(importlib.util.find_spec(x) is None for x in maker.packages):
            continue
        program = maker.make(*[two] * maker.is_on_mesh)
        found = explain_program(program.step, *program.args, target="h100")
        with target("h100"):
            text = optimized(program, two if maker.is_on_mesh else one)
        report[name] = {
            "listed": sorted([str(x), times] for x, times in listed(found).items()),
            "compiled": sorted([str(x), times] for x, times in compiled(text).items()),
            "expected": [program.forward, program.backward],
            "others": [str(x) for x in found.others],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
