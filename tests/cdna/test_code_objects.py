"""Every fmha code object of AITER's can be read, and every instruction in it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.aiter_dispatch import build
from tests.support.cdna import generations
from tests.support.cdna.code_object import read
from tests.support.cdna.listings import machine
from tests.support.extent import sample


@pytest.mark.parametrize("arch", generations.ARCHS)
@pytest.mark.parametrize("generation", generations.GENERATIONS)
def test_every_kernel_is_known(generation: str, arch: str):
    if missing := generations.missing(generation):
        pytest.skip(missing)
    paths = generations.code_objects(generation, arch)
    assert len(paths) > 90
    for path in sample(paths, 9):
        kernel, _ = machine().load(path)
        assert kernel.arch == arch
        assert kernel.lds_bytes <= {"gfx942": 65536, "gfx950": 163840}[arch], path


@pytest.mark.usefixtures("dispatch")
def test_descriptor_and_metadata_of_a_kernel():
    path = Path(build.asm_folder("gfx942")) / "fmha_v3_bwd" / "bwd_hd128_bf16_a32_rtne.co"
    kernel = read(path)
    assert "fmha_bwd_hd128_bf16_a32_rtne" in kernel.name
    assert (kernel.lds_bytes, kernel.vgprs, kernel.first_agpr) == (65536, 512, 256)
    assert (kernel.user_sgprs, kernel.group_id_mask) == ((-2,), 7)
    assert kernel.flushes_denormals
