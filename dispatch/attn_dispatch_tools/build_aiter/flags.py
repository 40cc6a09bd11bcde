"""The compiler flags for AITER's attention libraries, from aiter/jit/core.py of the wheel."""

from __future__ import annotations

# From COMMON_HIP_FLAGS and COMMON_HIPCC_FLAGS of aiter/jit/utils/cpp_extension.py and build_module.
# -w replaces AITER's flags for warnings, because its sources cannot be changed here.
_COMMON = """
-std=c++20 -O3 -fPIC -mcmodel=large
-ffunction-sections -fdata-sections -fno-unique-section-names
-fvisibility=hidden -fvisibility-inlines-hidden
-DWITH_HIP -DUSE_ROCM=1 -DHIPBLAS_V2 -DLEGACY_HIPBLAS_DIRECT -DCUDA_HAS_FP16=1 -DUSE_PROF_API=1
-D__HIP_PLATFORM_AMD__=1 -D__HIP_PLATFORM_HCC__=1
-U__HIP_NO_HALF_CONVERSIONS__ -U__HIP_NO_HALF_OPERATORS__
-fgpu-flush-denormals-to-zero -w
""".split()

FORWARD = (
    "-DCK_TILE_FMHA_FWD_FAST_EXP2=1",
    "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=2",
    "-DCK_TILE_FMHA_FWD_SPLITKV_API=1",
)
BACKWARD = ("-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0",)


def common(hip: tuple[int, ...]) -> list[str]:
    """AITER's flags for this version of ROCm's HIP, such as (7, 1, 25424)."""
    options = ["--amdgpu-kernarg-preload-count=16"]
    if hip <= (6, 3, 42132):
        options += ["--amdgpu-enable-max-ilp-scheduling-strategy=1"]
    if hip > (5, 5, 0):
        options += ["--lsr-drop-solution=1"]
    if hip > (6, 1, 40090):
        options += ["-enable-post-misched=0"]
    if hip > (6, 2, 41132):
        options += ["-amdgpu-early-inline-all=true", "-amdgpu-function-calls=false"]
    if hip > (6, 2, 41133):
        options += ["-amdgpu-coerce-illegal-types=1"]
    uniform = ["-fno-offload-uniform-block"] if hip > (5, 7, 23302) else []
    return [*_COMMON, *uniform, *(f"-mllvm={option}" for option in options)]


def upstream_clang() -> list[str]:
    """The flags for a clang that is not AMD's: those for the newest HIP, without AMD's own."""
    return without_amd_only(common((7, 0, 0)))


def without_amd_only(wanted: list[str]) -> list[str]:
    """The flags without those that only AMD's clang can use."""
    return [flag for flag in wanted if not flag.startswith(_AMD_ONLY)]


_AMD_ONLY = (
    # With these, upstream's clang 22 takes over ten minutes for a file instead of half a minute.
    "-mllvm=-amdgpu-early-inline-all",
    "-mllvm=-amdgpu-function-calls",
    # This option is a patch by AMD.
    "-mllvm=-amdgpu-coerce-illegal-types",
)
