"""A real build with one forward, one backward and one split-KV kernel of CK for each architecture.

The build takes minutes, and needs the amd-aiter wheel and a HIP compiler, but no GPU. It runs if
ATTN_DISPATCH_TEST_BUILD_AITER names a folder, in which the build stays and can be continued. If
ATTN_DISPATCH_RESULTS names a folder, the numbers are written there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import pybind11
import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch_tools.build_aiter import command
from attn_dispatch_tools.build_aiter.generate import Filters
from tests.support.aiter_emulated import HANDLERS, ROCM_BACKEND
from tests.support.device_code import code_objects

pytestmark = pytest.mark.skipif(
    not os.environ.get("ATTN_DISPATCH_TEST_BUILD_AITER"),
    reason="takes minutes; set ATTN_DISPATCH_TEST_BUILD_AITER to a folder to build in",
)

# One kernel each: bf16, head dim 128, causal, with log-sum-exp. The split-KV kernel decodes from
# pages; its file also has variants for other lengths and heads, and the kernels that combine.
_FILTERS = Filters(
    "fmha_fwd_d128_bf16_batch_*_psskddv_nlogits_nbias_mask_lse_ndropout_*",
    "*@*@fmha_bwd_d128_bf16_batch_*_npad_nbias_ndbias_mask_ndropout_ndeterministic_ntrload*",
    "fmha_fwd_splitkv_d128_bf16_batch_*_pssk_nlogits_nbias_nmask_lse_nsquant_pagedkv",
)
_LIBRARIES = aiter_folder.libraries("gfx942")
_FORWARD, _BACKWARD, _ADAPTER = _LIBRARIES
# The system libraries that a library of the build may need.
_SYSTEM = r"(libamdhip64|libstdc\+\+|libc|libm|libgcc_s|ld-linux-x86-64)\.so"


@pytest.fixture(scope="module", params=aiter_folder.ARCHS)
def folder(request):
    """The folder of the finished build, named after the architecture."""
    folder = Path(os.environ["ATTN_DISPATCH_TEST_BUILD_AITER"]) / request.param
    started = time.monotonic()
    command.build(folder.name, folder, _FILTERS, command.default_jobs())
    seconds = round(time.monotonic() - started)
    if results := os.environ.get("ATTN_DISPATCH_RESULTS"):
        _write_results(Path(results), folder, seconds)
    return folder


def _write_results(results: Path, folder: Path, seconds: int) -> None:
    numbers = {
        "build": json.loads((folder / "build.json").read_text()),
        "seconds": seconds,
        "jobs": command.default_jobs(),
        "seconds_by_file": _seconds_by_file(folder / "work" / ".ninja_log"),
        "bytes": {name: (folder / name).stat().st_size for name in _LIBRARIES},
        "device_code": {name: _device_code(folder / name) for name in _LIBRARIES},
        "needed": {name: _needed(folder / name) for name in _LIBRARIES},
    }
    path = results / f"aiter_build-{folder.name}_one_of_each.json"
    path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def _seconds_by_file(log: Path) -> dict[str, float]:
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]]
    return {Path(name).name: (int(end) - int(start)) / 1000 for start, end, _, name, _ in rows}


def _device_code(library: Path) -> dict[str, object]:
    found = list(code_objects(library))
    return {
        "targets": sorted({code.bundle_entry for code in found}),
        "kernels": sum(len(code.kernels) for code in found),
        "bytes": sum(code.size for code in found),
    }


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", str(library)))


def _output(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", _LIBRARIES)
def test_every_symbol_is_defined_by_the_needed_libraries(folder, name):
    resolved = _output("ldd", "-r", str(folder / name))
    assert "undefined symbol" not in resolved
    assert "not found" not in resolved
    others = [needed for needed in _needed(folder / name) if not re.match(_SYSTEM, needed)]
    assert others == ([_FORWARD, _BACKWARD] if name == _ADAPTER else [])


@pytest.mark.parametrize("name", _LIBRARIES)
def test_only_the_interface_is_exported(folder, name):
    exported = _output("nm", "-DC", "--defined-only", "--format=just-symbols", str(folder / name))
    functions = {line.split("(")[0] for line in exported.splitlines() if "aiter" in line}
    expected = {
        _FORWARD: {f"aiter::mha_{kind}" for kind in ("fwd", "fwd_splitkv", "batch_prefill")},
        _BACKWARD: {"aiter::mha_bwd"},
        _ADAPTER: {"attn_dispatch_aiter"},
    }
    assert functions == expected[name]


@pytest.mark.parametrize(
    ("name", "kernel", "number"),
    [
        (_FORWARD, "FmhaFwdKernel", 1),
        (_BACKWARD, "FmhaBwdDQDKDVKernel", 1),
        # With and without uneven splits, each with and without merged heads of a group.
        (_FORWARD, "FmhaFwdSplitKVKernel", 4),
        # For up to 8, 16, 32, 64 and 128 splits, with and without log-sum-exp.
        (_FORWARD, "FmhaFwdSplitKVCombineKernel", 10),
    ],
)
def test_the_libraries_contain_kernels_for_the_gpu(folder, name, kernel, number):
    found = list(code_objects(folder / name))
    assert {(code.bundle_entry, code.machine) for code in found} == {
        (f"hipv4-amdgcn-amd-amdhsa--{folder.name}", folder.name)
    }
    kernels = [name for code in found for name in code.kernels]
    assert len([name for name in kernels if kernel in name]) == number, kernels


def test_the_adapter_loads_and_names_its_generation(folder):
    """A new process loads the adapter, with the HIP that it was built against."""
    load = (
        "import ctypes; library = ctypes.CDLL({!r});"
        "library.attn_dispatch_aiter.restype = ctypes.POINTER(ctypes.c_char_p);"
        "print(library.attn_dispatch_aiter()[1].decode())"
    )
    script = load.format(str(folder / _ADAPTER))
    assert _output(sys.executable, "-c", script).strip() == aiter_folder.GENERATION


def test_our_library_loads_the_adapter(folder, tmp_path):
    """`_rocm` is built against the same HIP, and every symbol is bound when it loads."""
    rocm = tmp_path / f"_rocm{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include")]
    _output(
        "g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden",
        "-D__HIP_PLATFORM_AMD__=1", *(f"-isystem{x}" for x in includes), "-idirafter/usr/include",
        f"-I{ROCM_BACKEND.parent / 'common_backend'}",
        *(str(ROCM_BACKEND / f"{name}.cc") for name in HANDLERS),
        "-ldl", "-o", str(rocm),
    )  # fmt: skip
    # Only symbols of the Python interpreter are undefined here.
    undefined = re.findall(r"undefined symbol: (\w+)", _output("ldd", "-r", str(rocm)))
    assert [name for name in undefined if not name.startswith(("Py", "_Py"))] == []
    script = (
        f"import sys; sys.path.insert(0, {str(rocm.parent)!r});"
        f"import _rocm; print(_rocm.load_aiter({str(folder / _ADAPTER)!r}, 'gfx942'))"
    )
    environment = os.environ | {"LD_BIND_NOW": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "None", done.stdout + done.stderr


def test_the_record_counts_the_asm_kernels_of_the_folder(folder):
    asm = aiter_folder.asm_folder(folder, folder.name)
    record = aiter_folder.read(folder)
    assert record is not None
    assert record.asm_kernels == len(list(asm.glob("fmha_v3_*/**/*.co"))) > 100
    assert {path.name for path in asm.iterdir()} == {"fmha_v3_fwd", "fmha_v3_bwd"}
