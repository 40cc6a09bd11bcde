"""A tiny stand-in for a checkout of AITER v0.1.15 or later, for tests of build-aiter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FORWARD = """\
dtype,hdim_q,hdim_v,mask,mode,bf16_cvt,ts_qo,ts_kv,knl_name,co_name
bf16,128,128,0,0,0,256,32,_ZN5aiter3oneE,one.co
// a comment
bf16,128,128,2,1,0,256,32,_ZN5aiter3twoE,two.co
"""
NO_ROWS = "dtype,hdim_q,hdim_v,mask,atomic32,pssk,pddv,mode,bf16_cvt,ts_qo,ts,knl_name,co_name\n"
_BACKWARD = ("odo", "dqdkdv", "dq_convert")

FILES = {
    "csrc/cpp_itfs/mha_fwd.cu": "a.hdim_q == 256 && a.hdim_v == 256",
    "csrc/cpp_itfs/mha_bwd.cu": "struct KernelArgBufferWriter",
    "csrc/include/mha_bwd.h": "std::function<void*(size_t, bool)> workspace_alloc{};",
    "hsa/gfx942/fmha_v3_fwd/fmha_fwd.csv": _FORWARD,
    **{
        f"hsa/gfx942/fmha_v3_bwd/fmha_bwd_{x}.csv": (
            f"{NO_ROWS}fp16,64,64,0,0,0,0,0,0,0,128,_ZN5aiter3{x}E,{x}.co\n"
        )
        for x in _BACKWARD
    },
    "hsa/gfx942/fmha_v3_bwd/fmha_bwd_dq_shuffle.csv": NO_ROWS,
    **{
        f"hsa/gfx942/fmha_v3_{x}.co": "kernel"
        for x in (
            "fwd/MI300/one",
            "fwd/MI308/one",
            "fwd/MI300/two",
            *(f"bwd/{y}" for y in _BACKWARD),
        )
    },
}
FILES_V0_1_17 = {"csrc/cpp_itfs/mha_fwd.cu": "a.hdim_q == 192"}
"""What is not the same in v0.1.17."""


def make_checkout(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    """Write the stand-in, v0.1.20, into `folder`, and return it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def make_wheel(folder: Path, version: str) -> Path:
    """Write it into `folder` as the installed wheel of a version, and return `folder`."""
    make_checkout(folder / "aiter_meta")
    information = folder / f"amd_aiter-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Name: amd-aiter\nVersion: {version}\n")
    return folder
