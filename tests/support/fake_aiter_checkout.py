"""A tiny stand-in for a checkout of AITER v0.1.15 or later, for tests of build-aiter."""

from __future__ import annotations

from pathlib import Path

_FORWARD = """\
dtype,hdim_q,hdim_v,mask,mode,bf16_cvt,ts_qo,ts_kv,knl_name,co_name
bf16,128,128,0,0,0,256,32,_ZN5aiter3oneE,one.co
// a comment
bf16,128,128,2,1,0,256,32,_ZN5aiter3twoE,two.co
"""
_ODO = """\
dtype,hdim_q,hdim_v,mode,ts,knl_name,co_name
fp16,64,64,0,128,_ZN5aiter3odoE,odo.co
"""
_NONE = "dtype,hdim_q,pssk,knl_name,co_name\n"

FILES = {
    "csrc/cpp_itfs/mha_fwd.cu": "",
    "csrc/cpp_itfs/mha_bwd.cu": "",
    "csrc/include/mha_bwd.h": "std::function<void*(size_t, bool)> workspace_alloc{};",
    "hsa/gfx942/fmha_v3_fwd/fmha_fwd.csv": _FORWARD,
    "hsa/gfx942/fmha_v3_bwd/fmha_bwd_odo.csv": _ODO,
    "hsa/gfx942/fmha_v3_bwd/fmha_bwd_dq_shuffle.csv": _NONE,
    **{
        f"hsa/gfx942/fmha_v3_{x}.co": "kernel"
        for x in ("fwd/MI300/one", "fwd/MI308/one", "fwd/MI300/two", "bwd/odo")
    },
}


def make_checkout(folder: Path) -> Path:
    """Write the stand-in into `folder`, and return it."""
    for name, text in FILES.items():
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
