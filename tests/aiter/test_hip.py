"""The adapter's use of HIP: devices, architectures, its errors and those of other code."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.support.aiter_dispatch import build, grid
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.aiter_dispatch.launches import ARCHS, atomic_32, launched

pytestmark = pytest.mark.skipif(
    isinstance(build.tools(), str), reason=str(build.tools()).replace("\n", " ")
)


@ARCHS
def test_the_adapter_names_the_arch_of_the_device(aiter_on: Any, arch: str):
    assert aiter_on(arch).table.api_version == 5
    assert aiter_on(arch).table.generation == b"dev18"
    assert aiter_on(arch).table.arch is None  # this library has the host code of both
    assert aiter_on(arch).device_arch() == arch
    assert aiter_on(arch).device_arch(size=6) == "the name of the GPU needs 7 bytes, got 6"


def test_ck_stands_in_where_the_loader_has_no_kernel_for_the_gpu(aiter_on: Any):
    library, struct = aiter_on("gfx942"), struct_of(grid.CALL, use_asm=True)
    for units, takes in ((304, True), (80, True), (64, True), (228, False), (38, False)):
        library.set_gpu("gfx942", units)
        assert library.takes_asm(struct) == takes
    failed, (record,) = library.run(struct)
    assert not failed and record.startswith("ck ")


@pytest.mark.parametrize("version", [6, 7])
def test_an_error_of_a_launch_is_reported_and_cleared(aiter_on: Any, version: int):
    library = aiter_on("gfx942")
    library.set_hip_version(version)
    library.set_launch_error(1)
    failed, records = library.run(struct_of(grid.CALL, use_asm=False))
    assert failed.startswith(
        'HIP reports "an error of the fake HIP" after AITER\'s launch of: bf16'
    )
    assert len(records) == 1
    assert library.last_error() == 0  # no other caller must take it for its own error
    library.run(struct_of(grid.CALL, use_asm=False))
    assert library.run(struct_of(grid.CALL, use_asm=False))[0] == ""


@pytest.mark.parametrize("version", [6, 7])
@pytest.mark.parametrize("use_asm", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_an_earlier_error_of_other_code_does_not_fail_the_call(
    aiter_on: Any, version: int, use_asm: bool, backward: bool
):
    """HIP 7 still reports it after our launch, and CK would stop after its first kernel."""
    library = aiter_on("gfx942")
    library.set_hip_version(version)
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=use_asm, accumulator="atomic_32" if use_asm else "split")
    expected = library.run(struct)
    assert expected[0] == "" and len(expected[1]) == (3 if backward and use_asm else 1)
    library.set_error(2)
    assert library.run(struct) == expected
    if use_asm:
        library.set_error(2)
        assert library.takes_asm(struct)
        assert library.last_error() == 0


@pytest.mark.parametrize("backward", [False, True])
def test_a_failed_query_of_the_current_device_leaves_no_error_behind(aiter_on: Any, backward: bool):
    """The forward pass then runs CK."""
    library, call = aiter_on("gfx942"), replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator=atomic_32(call))
    for first in (0, 1, 2, 3):  # calls of hipGetDevice that succeed before one fails
        library.fail_call("hipGetDevice", first)
        failed, _ = library.run(struct)
        assert not failed or "an error of the fake HIP" in failed
        assert library.last_error() == 0
        library.fail_call("", 0)


def test_a_device_that_could_not_be_made_current_works_in_the_next_call(aiter_on: Any):
    library, results = aiter_on("gfx942"), []
    struct = struct_of(grid.CALL, use_asm=True)

    def run() -> None:
        library.set_device(0)
        results.append(library.run(struct))
        library.set_device(7)  # the adapter starts a thread for it
        library.fail_call("hipSetDevice", 0)
        results.extend(library.run(struct) for _ in range(2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (first, _), (second, records), (third, _) = results
    assert (first, records, third) == ("", [], "")
    assert second == "HIP cannot make the device current: an error of the fake HIP"


@pytest.mark.parametrize("backward", [False, True])
def test_missing_files_of_asm_kernels_are_reported(aiter_on: Any, backward: bool):
    library = aiter_on("gfx942")
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator="atomic_32")
    name = "fmha_v3_bwd/" if backward else "fmha_v3_fwd/"
    for folder, missing in (("", "hsa/gfx…/"), ("/nowhere/hsa/gfx942/", "/nowhere/hsa/gfx942/")):
        library.set_asm_folder("gfx942", folder)
        failed, records = library.run(struct)
        assert f"ASM kernels are missing: there is no folder {missing}{name} beside" in failed
        assert not records


def test_the_environment_does_not_name_the_folder_of_kernels(
    aiter_on: Any, monkeypatch: pytest.MonkeyPatch
):
    """`import aiter` sets AITER_ASM_DIR to the kernels of another version."""
    monkeypatch.setenv("AITER_ASM_DIR", "/nowhere/")
    _, file = launched(grid.CALL, aiter_on("gfx942").run(struct_of(grid.CALL, use_asm=True))[1])
    assert file.startswith(build.asm_folder("gfx942"))


@pytest.mark.parametrize("backward", [False, True])
def test_one_thread_runs_calls_on_several_devices(aiter_on: Any, backward: bool):
    """AITER keeps ASM kernels per thread, each loaded on one device."""
    library, results = aiter_on("gfx950"), []
    call = replace(grid.CALL, backward=backward)
    struct = struct_of(call, use_asm=True, accumulator=atomic_32(call))

    def run() -> None:
        for device in (3, 4, 3, 5, 4):
            library.set_device(device)
            results.append(library.run(struct))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(results) == 10
    for failed, records in results:
        assert failed == ""
        launched(call, records)  # which checks that the kernel was loaded on this device


def test_devices_of_two_architectures_run_their_own_kernels(aiter_on: Any):
    """Each device's calls take its architecture's kernels, whichever device is 0."""
    library, files = aiter_on("gfx942"), []
    library.set_gpu_of(1, "gfx950")

    def run() -> None:
        for device in (0, 1, 0, 1):
            library.set_device(device)
            failed, records = library.run(struct_of(grid.CALL, use_asm=True))
            assert failed == ""
            files.append(launched(grid.CALL, records)[1])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [re.findall(r"/hsa/(\w+)/", x)[0] for x in files] == ["gfx942", "gfx950"] * 2
