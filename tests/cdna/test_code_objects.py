"""Every fmha code object of AITER's can be read, and every instruction in it is known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.aiter_dispatch import build
from tests.support.cdna.code_object import read
from tests.support.cdna.listings import machine
from tests.support.extent import EVERY_SIZE

OF_FLOAT8 = "_fp8"


def _folders() -> list[Path]:
    """The kernels of the wheel, and of AITER's sources if there are some."""
    found = [build.asm_folder(arch) for arch in build.ARCHS]
    sources = os.environ.get("ATTN_DISPATCH_AITER_DIR")
    return [*map(Path, found), *(Path(sources or "") / "hsa" / x for x in build.ARCHS if sources)]


@pytest.mark.usefixtures("dispatch")
def test_every_kernel_is_known():
    for folder in _folders():
        paths = sorted(folder.glob("fmha_v3_*/**/*.co"))
        assert len(paths) > 100
        for path in paths[:: 1 if EVERY_SIZE else 9]:
            if OF_FLOAT8 in path.name:
                continue
            kernel, _ = machine().load(path)
            assert kernel.arch == folder.name
            assert kernel.lds_bytes <= {"gfx942": 65536, "gfx950": 163840}[kernel.arch], path


@pytest.mark.usefixtures("dispatch")
def test_descriptor_and_metadata_of_a_kernel():
    path = Path(build.asm_folder("gfx942")) / "fmha_v3_bwd" / "bwd_hd128_bf16_a32_rtne.co"
    kernel = read(path)
    assert "fmha_bwd_hd128_bf16_a32_rtne" in kernel.name
    assert (kernel.lds_bytes, kernel.vgprs, kernel.first_agpr) == (65536, 512, 256)
    assert (kernel.user_sgprs, kernel.group_id_mask) == ((-2,), 7)
    assert kernel.flushes_denormals
