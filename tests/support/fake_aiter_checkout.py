"""A tiny stand-in for a checkout of AITER v0.1.15 or later, for tests of build-aiter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.fake_aiter import code_object

FORWARD = """\
dtype,hdim_q,hdim_v,mask,mode,bf16_cvt,ts_qo,ts_kv,knl_name,co_name
bf16,128,128,0,0,0,256,32,_ZN5aiter3oneE,one.co
// a comment
bf16,128,128,2,1,0,256,32,_ZN5aiter3twoE,two.co
"""
NO_ROWS = "dtype,hdim_q,hdim_v,mask,atomic32,pssk,pddv,mode,bf16_cvt,ts_qo,ts,knl_name,co_name\n"
_BACKWARD = {
    "gfx942": ("odo", "dqdkdv", "dq_convert"),
    "gfx950": ("odo", "dqdkdv", "dq_convert", "dq_shuffle"),
}
_FORWARD_FOLDERS = {"gfx942": ("MI300", "MI308"), "gfx950": (".",)}

SOURCES = {
    "csrc/cpp_itfs/mha_fwd.cu": "a.hdim_q == 256 && a.hdim_v == 256",
    "csrc/cpp_itfs/mha_bwd.cu": "struct KernelArgBufferWriter",
    "csrc/include/mha_bwd.h": "std::function<void*(size_t, bool)> workspace_alloc{};",
    "csrc/include/aiter_hip_common.h": "int cluster_x = 1;",
}
SOURCES_V0_1_17 = {"csrc/cpp_itfs/mha_fwd.cu": "a.hdim_q == 192"}
"""What is not the same in v0.1.17."""


def make_checkout(folder: Path, arch: str = "gfx942") -> Path:
    """Write the stand-in, v0.1.20, into `folder`, and return it."""
    backward = {x: f"_ZN5aiter{len(x)}{x}E" for x in _BACKWARD[arch]}
    rows = {x: f"fp16,64,64,0,0,0,0,0,0,0,128,{y},{x}.co\n" for x, y in backward.items()}
    tables = {f"fmha_v3_bwd/fmha_bwd_{x}.csv": NO_ROWS + y for x, y in rows.items()}
    kernels = {f"fmha_v3_bwd/{x}.co": kernel(arch, y) for x, y in backward.items()}
    for place in _FORWARD_FOLDERS[arch]:
        for name in ("one", "two"):
            path = f"fmha_v3_fwd/{place}/{name}.co"
            kernels[path] = kernel(arch, f"_ZN5aiter3{name}E")
    write(folder, SOURCES)
    write(folder / "hsa" / arch, {"fmha_v3_bwd/fmha_bwd_dq_shuffle.csv": NO_ROWS})
    write(folder / "hsa" / arch, {"fmha_v3_fwd/fmha_fwd.csv": FORWARD, **tables})
    write(folder / "hsa" / arch, kernels)
    return folder


def kernel(arch: str, name: str) -> bytes:
    """The file of an ASM kernel: no more of it than its header and the name of its descriptor."""
    return code_object(arch) + f"\0{name}.kd\0".encode()


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files, by their paths in `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def make_wheel(folder: Path, version: str) -> Path:
    """Write it into `folder` as the installed wheel of a version, and return `folder`."""
    make_checkout(folder / "aiter_meta")
    information = f"amd_aiter-{version}.dist-info/METADATA"
    write(folder, {information: f"Name: amd-aiter\nVersion: {version}\n"})
    return folder
