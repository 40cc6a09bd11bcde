"""The steps of `attn-dispatch build-aiter`: generating sources, choosing flags, compiling."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys

import pytest

from attn_dispatch_tools.build_aiter import flags, generate, ninja, toolchain, wheel
from attn_dispatch_tools.build_aiter.generate import Filters
from attn_dispatch_tools.build_aiter.ninja import Library
from attn_dispatch_tools.build_aiter.toolchain import Toolchain
from attn_dispatch_tools.terminal.building import BuildError
from tests.support import fake_aiter
from tests.support.fake_aiter import needs_ninja


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """The folder of the stand-in for the wheel."""
    folder = tmp_path / "wheel"
    fake_aiter.make_wheel(folder)
    monkeypatch.setenv("ATTN_DISPATCH_AITER_WHEEL", str(folder))
    return folder


# Generated sources.


def test_filters_are_made_from_a_part_of_a_name_or_given_whole():
    assert Filters.parse(None, None, None) == Filters() == Filters("*", "*@*@*", "*")
    part = "*d128_bf16*"
    assert Filters.parse("d128_bf16", None, None) == Filters(part, f"*@*@{part}", part)
    own = Filters.parse("d128", "fmha_*", "*@*@none", "y")
    assert own == Filters("fmha_*", "*@*@none", "y", must_match=("fmha_*", "y"))


def test_generated_files_follow_the_filters_and_are_not_rewritten(unpacked, tmp_path):
    filters = Filters.parse("d128", None, None)
    forward, backward = generate.generate(wheel.find(), "gfx942", filters, tmp_path / "work")
    assert {path.name for path in forward.files} == {
        "fmha_fwd_d128_bf16_batch_ndropout_nskip_gfx9.cpp",
        "fmha_fwd_d128_bf16_batch_dropout_nskip_gfx9.cpp",  # only features that calls use
        "fmha_fwd_api.cpp",
        "fmha_fwd_splitkv_d128_bf16_batch_ndropout_nskip_gfx9.cpp",
        "fmha_fwd_splitkv_d128_bf16_batch_dropout_nskip_gfx9.cpp",
        "fmha_fwd_splitkv_api.cpp",
        "fmha_batch_prefill_api.cpp",  # empty, since no call uses prefill
        "cpp_itfs_mha_fwd_generate.cpp",
        "fmha_v3_fwd_codegen.cpp",
    }
    assert (forward.kernels, forward.kernels_in_all) == (4, 8)
    assert (backward.kernels, backward.kernels_in_all) == (2, 4)
    dispatch = next(path for path in forward.files if "itfs" in path.name)
    assert "['gfx942']" in dispatch.read_text()

    stamps = {path: path.stat().st_mtime_ns for path in forward.files}
    everything, _ = generate.generate(wheel.find(), "gfx942", Filters(), tmp_path / "work")
    assert everything.kernels == 8
    assert {path: path.stat().st_mtime_ns for path in forward.files} == stamps


def test_a_filter_that_matches_no_kernel_is_an_error(unpacked, tmp_path):
    with pytest.raises(
        BuildError, match=r"no kernel matches '\*d127\*', .* or .*; names look like"
    ):
        generate.generate(wheel.find(), "gfx942", Filters.parse("d127", None, None), tmp_path)


@pytest.mark.parametrize("number, pattern", [(0, "*d127*"), (1, "*@*@*d127*"), (2, "*d127*")])
def test_a_pattern_that_matches_no_kernel_is_an_error(unpacked, tmp_path, number, pattern):
    """Even if others match, as a library without the kernels that were asked for is of no use."""
    own: list[str | None] = [None, None, None]
    own[number] = pattern
    filters = Filters.parse("d128", *own)
    with pytest.raises(BuildError, match=rf"matches {re.escape(repr(pattern))}; .* say 'none'"):
        generate.generate(wheel.find(), "gfx942", filters, tmp_path)


def test_a_library_without_cks_kernels_can_be_asked_for(unpacked, tmp_path):
    filters = Filters.parse("d128", None, "*@*@none")
    forward, backward = generate.generate(wheel.find(), "gfx942", filters, tmp_path)
    assert (forward.kernels, backward.kernels) == (4, 0)


def test_a_failed_generator_is_an_error(unpacked, tmp_path):
    script = unpacked / "aiter_meta/hsa/gfx942/fmha_v3_fwd/codegen.py"
    script.write_text("raise KeyError('lost')")
    with pytest.raises(BuildError, match=rf"(?s)generator {script} failed; .*lost"):
        generate.generate(wheel.find(), "gfx942", Filters(), tmp_path)


def test_small_files_are_joined(tmp_path):
    for number in range(10):
        text = f"using trait_0 = A<{number}>; template <> int f<trait_0>();\n"
        (tmp_path / f"kernel_{number}.cpp").write_text(text)
    generate._join(tmp_path)
    first, second = sorted(tmp_path.glob("*.cpp"))
    assert "using trait_7 = A<7>; template <> int f<trait_7>();" in first.read_text()
    assert second.read_text().count("using") == 2


# The compiler and its flags.


def test_flags_follow_the_version_of_hip():
    old, new = flags.common((5, 5, 0)), flags.common((7, 1, 25424))
    assert not any("function-calls" in flag for flag in old)
    assert "-mllvm=-amdgpu-function-calls=false" in new
    upstream = flags.upstream_clang()
    assert set(upstream) < set(new)
    assert not any("amdgpu-function-calls" in flag for flag in upstream)


def test_the_version_of_hip_is_read_from_hipccs_output():
    text = "HIP version: 6.4.43482-0f2d60242\nAMD clang version 19.0.0git"
    assert toolchain.hip_version(text) == (6, 4, 43482)
    with pytest.raises(BuildError, match="names no HIP version; it printed: 'clang'"):
        toolchain.hip_version("clang")


HIPCC = "#!/bin/sh\ncat <<'EOF'\n{}\nEOF\n"
AMD_OUTPUT = (
    "HIP version: 6.4.43482-0f2d60242\nAMD clang version 19.0.0git (/llvm f2d)\nTarget: x86_64"
)


def make_hipcc(folder, text):
    hipcc = folder / "bin" / "hipcc"
    hipcc.parent.mkdir(parents=True)
    hipcc.write_text(HIPCC.format(text))
    hipcc.chmod(0o755)
    return str(hipcc)


def test_hipcc_of_rocm_path_comes_first(tmp_path, monkeypatch):
    named, first = (make_hipcc(tmp_path / x, AMD_OUTPUT) for x in ("named", "first"))
    monkeypatch.setenv("PATH", f"{tmp_path}/first/bin:/usr/bin:/bin")
    monkeypatch.delenv("ROCM_PATH", raising=False)
    assert toolchain.find("gfx942", tmp_path).link == (first,)
    monkeypatch.setenv("ROCM_PATH", f"{tmp_path}/named")
    found = toolchain.find("gfx942", tmp_path)
    assert found.link == (named,) and found.compile[0] == named
    assert found.description == "hipcc of HIP 6.4.43482" and not found.compile_check_only
    assert "-mllvm=-amdgpu-function-calls=false" in found.compile
    monkeypatch.setenv("ROCM_PATH", f"{tmp_path}/nowhere")
    with pytest.raises(BuildError, match=r"ROCM_PATH=.*/nowhere holds no bin/hipcc; set it to"):
        toolchain.find("gfx942", tmp_path)


def test_a_clang_that_is_not_amds_gets_no_flags_of_amds(tmp_path, monkeypatch):
    make_hipcc(
        tmp_path / "rocm", AMD_OUTPUT.replace("AMD clang version 19.0.0git", "clang version 20")
    )
    monkeypatch.setenv("ROCM_PATH", f"{tmp_path}/rocm")
    found = toolchain.find("gfx942", tmp_path)
    assert found.description.endswith("a clang that is not AMD's (clang version 20 (/llvm f2d))")
    assert "-O3" in found.compile
    assert not any("amdgpu-function-calls" in flag for flag in found.compile)


def test_a_hip_that_is_too_old_is_refused(tmp_path, monkeypatch):
    make_hipcc(tmp_path / "rocm", "HIP version: 5.2.21153-0\nDebian clang version 15.0.6")
    monkeypatch.setenv("ROCM_PATH", f"{tmp_path}/rocm")
    with pytest.raises(BuildError, match=r"is the hipcc of HIP 5\.2\.21153, and AITER needs"):
        toolchain.find("gfx942", tmp_path)


def test_flags_that_the_compiler_does_not_know_are_left_out(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *new*) echo unknown >&2; exit 1;; esac\n')
    compiler.chmod(0o755)
    found = toolchain._known_flags((str(compiler),), ["-O3", "-new", "-w"], tmp_path)
    assert found == (["-O3", "-w"], ("-new",))


# Compiling.


@pytest.fixture
def project(tmp_path):
    """The build folder, the stand-in compiler and its log, and five sources of two libraries."""
    tools, log = fake_aiter.make_toolchain(tmp_path)
    folder = tmp_path / "a folder with $signs"
    folder.mkdir()
    sources = tuple(folder / f"file {number}.cpp" for number in range(5))
    for source in sources:
        source.write_text("int x;")
    ninja.write(folder, tools, [Library("liba.so", sources[:3]), Library("libb.so", sources[3:])])
    return folder, tools, log, sources


def _ignore(done: int, total: int, step: str) -> None:
    pass


@needs_ninja
def test_an_interrupted_build_continues(project):
    folder, _, log, sources = project

    def interrupt(done: int, total: int, step: str) -> None:
        assert total == 7
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ninja.run(folder, 1, interrupt)
    before = log.read_text().splitlines()
    assert 2 <= len(before) < 7

    reported = []
    ninja.run(folder, 1, lambda *step: reported.append(step))
    assert (
        reported[-1][0] == reported[-1][1] <= 7 - len(before) + 1
    )  # one step may have been interrupted
    # The two runs together have finished every step.
    assert {"liba.so", "libb.so", *(f"{path.stem}.o" for path in sources)} == set(
        log.read_text().splitlines()
    )

    log.write_text("")
    ninja.run(folder, 1, _ignore)
    assert log.read_text() == ""
    sources[0].write_text("int y;")
    ninja.run(folder, 1, _ignore)
    assert log.read_text().split("\n")[:-1] == ["file 0.o", "liba.so"]


@needs_ninja
def test_a_failure_shows_the_output_of_the_compiler(project):
    folder, _, _, sources = project
    sources[1].write_text("broken")
    with pytest.raises(BuildError, match=r"the same command continues it") as stop:
        ninja.run(folder, 1, _ignore)
    assert "file 1.cpp: error: this is broken" in str(stop.value)
    assert "-MMD" not in str(stop.value)


HIP_STAND_IN = """\
#pragma once
extern "C" {
typedef int hipError_t;
enum { hipSuccess = 0 };
struct hipDeviceProp_t { int device; };
#define hipGetDeviceProperties hipGetDevicePropertiesR0600
hipError_t hipGetDevice(int* device);
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device);
typedef void *hipModule_t, *hipFunction_t, *hipStream_t;
const char* hipGetErrorString(hipError_t error);
hipError_t hipModuleLoad(hipModule_t* module, const char* file);
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name);
hipError_t hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, hipStream_t, void**, void**);
}
"""
HIP = """
#include <hip/hip_runtime_api.h>
extern "C" {
hipError_t hipGetDevice(int* device) { return *device = 3, 0; }
hipError_t hipGetDeviceProperties(hipDeviceProp_t* p, int device) { return p->device = device, 0; }
const char* hipGetErrorString(hipError_t) { return "an error"; }
hipError_t hipModuleLoad(hipModule_t*, const char*) { return 0; }
hipError_t hipModuleGetFunction(hipFunction_t*, hipModule_t, const char*) { return 0; }
hipError_t hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, hipStream_t, void**, void**) { return 0; }
}
"""
CALLER = """
#include <hip/hip_runtime_api.h>
#include <cstdlib>
#include "aiter_environment.h"
extern "C" const char* asked(const char* name) { return getenv(name); }
extern "C" const char* arch() { return attn_dispatch::aiter_adapter::ArchOfBuild(); }
extern "C" int device() { hipDeviceProp_t p; hipGetDeviceProperties(&p, 0); return p.device; }
"""


@needs_ninja
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("asm_root", [False, True])
def test_each_build_gets_its_own_folder_of_asm_kernels_and_arch(tmp_path, asm_root):
    """The libraries of two builds, linked as AITER's are, run in one process."""
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip" / "hip_runtime_api.h").write_text(HIP_STAND_IN)
    (tmp_path / "asks.cc").write_text(CALLER)
    (tmp_path / "hip.cc").write_text(HIP)
    adapter = wheel.adapter_folder()
    flags = ("-std=c++20", "-fPIC", f"-I{tmp_path}", f"-I{adapter}")
    tools = Toolchain("g++", ("g++", *flags), ("g++",))
    sources = (tmp_path / "asks.cc", *(adapter / x for x in wheel.ENVIRONMENT))
    (tmp_path / "a file").touch()
    others = ("/nowhere/", "", tmp_path / "a file", tmp_path / "gfx950" / "hsa", tmp_path / "hip")
    lines = ["import ctypes, os", "os.environ['AITER_ASM_DIR'] = '/nowhere/'"]
    lines += ["os.environ.pop('AITER_LOG_LEVEL', None)"]
    for arch in ("gfx942", "gfx950"):
        folder = tmp_path / arch
        for other in ("gfx950", "gfx90a", "gfx942"):  # folders are read in any order
            (folder / "hsa" / other).mkdir(parents=True)
        libraries = [
            Library("libhip.so", (tmp_path / "hip.cc",)),
            Library(
                f"libasks_{arch}.so",
                sources,
                (),
                ("libhip.so",),
                ninja.WRAPPED,
                wheel.environment_flags(arch, asm_root=asm_root),
            ),
        ]
        ninja.write(folder, tools, libraries)
        ninja.run(folder, 2, _ignore)
        lines += [
            f"x = ctypes.CDLL({str(folder / f'libasks_{arch}.so')!r})",
            "x.asked.restype = x.arch.restype = ctypes.c_char_p",
            "print(x.asked(b'AITER_ASM_DIR').decode(), x.asked(b'HOME2'), x.device(), x.arch())",
            "print(x.asked(b'AITER_LOG_LEVEL').decode())",
            "asked = {x.asked(b'AITER_ASM_DIR')}",
            *(
                f"os.environ['AITER_ASM_DIR'] = {str(y)!r}; asked.add(x.asked(b'AITER_ASM_DIR'))"
                for y in others
            ),
            "del os.environ['AITER_ASM_DIR']",
            "print(len(asked | {x.asked(b'AITER_ASM_DIR')}))",
        ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = []
    for arch in ("gfx942", "gfx950"):
        folder = f"{tmp_path}/{arch}/hsa" + ("" if asm_root else f"/{arch}/")
        expected += [f"{folder} None 3 b'{arch}'", "ERROR", "1"]
    assert done.stdout.splitlines() == expected


@needs_ninja
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_library_must_name_the_libraries_that_it_needs(tmp_path):
    """Real libraries are linked; one needs the other and finds it beside itself."""
    tools = Toolchain("g++", ("g++", "-fPIC"), ("g++",))
    sources = {
        "one": "int one() { return 1; }",
        "two": "int one(); int two() { return one() + 1; }",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.cpp").write_text(text)
    first = Library("libone.so", (tmp_path / "one.cpp",))
    second = Library("libtwo.so", (tmp_path / "two.cpp",), needs=("libone.so",))
    ninja.write(tmp_path, tools, [first, second])
    ninja.run(tmp_path, 2, _ignore)
    load = f"import ctypes; print(ctypes.CDLL({str(tmp_path / 'libtwo.so')!r})._Z3twov())"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"

    ninja.write(tmp_path, tools, [first, dataclasses.replace(second, needs=())])
    with pytest.raises(BuildError, match=r"undefined reference to .one\(\)"):
        ninja.run(tmp_path, 2, _ignore)
