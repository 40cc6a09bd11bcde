"""How the suite's programs are compiled for a CPU."""

from __future__ import annotations

import jax

COMPILE_QUICKLY: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options with which XLA compiles for the CPU in a fraction of the time."""
if jax.__version_info__ < (0, 11):
    COMPILE_QUICKLY["xla_cpu_use_fusion_emitters"] = False
