"""Print the include directories that the CUDA backend needs, one per line.

They are looked for in the folders of $ATTN_DISPATCH_INCLUDE, then in this interpreter's packages,
so that a machine that has cuDNN for JAX needs no second copy, then in $CUDA_HOME and in system
folders.
"""

import importlib.metadata
import os
import pathlib
import sys

# header -> the wheels that may contain it
WANTED = {
    "cudnn_frontend.h": ["nvidia-cudnn-frontend"],
    "cudnn.h": ["nvidia-cudnn-cu13", "nvidia-cudnn-cu12"],
    "cuda.h": ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"],
    "cuda_runtime_api.h": ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"],
    "crt/host_defines.h": ["nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"],
    "nv/target": ["nvidia-cuda-cccl", "nvidia-cuda-cccl-cu12"],
    "nvrtc.h": ["nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"],
    "xla/ffi/api/ffi.h": ["jaxlib"],
}
SYSTEM = [
    os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/include",
    os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/include/cccl",
    "/usr/include",
]


def include_dir(header: str, wheels: list[str]) -> str | None:
    """Return the folder in which `#include <header>` finds the header, or None."""
    for chosen in os.environ.get("ATTN_DISPATCH_INCLUDE", "").split(os.pathsep):
        if chosen and pathlib.Path(chosen, header).exists():
            return chosen
    depth = header.count("/")
    for wheel in wheels:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if f"/{file}".endswith(f"/{header}"):
                found = pathlib.Path(str(file.locate())).resolve()
                if found.exists():
                    return str(found.parents[depth])
    return next((d for d in SYSTEM if pathlib.Path(d, header).exists()), None)


found = {header: include_dir(header, wheels) for header, wheels in WANTED.items()}
missing = [f"{h} (pip install --no-deps {WANTED[h][0]})" for h, d in found.items() if d is None]
if missing:
    sys.exit("headers not found: " + ", ".join(missing))
print("\n".join(dict.fromkeys(str(d) for d in found.values())))
