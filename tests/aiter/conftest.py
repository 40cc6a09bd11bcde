"""Fixtures: AITER's dispatch, compiled from its wheel, and its kernels, emulated on this CPU."""

from __future__ import annotations

from typing import Any

import pytest

import attn_dispatch
from attn_dispatch.core import primitive
from attn_dispatch.devices.target import device_for
from tests.support import aiter_emulated
from tests.support.aiter_dispatch import api, build


@pytest.fixture(scope="module")
def libraries() -> tuple[api.Library, api.Library]:
    dispatch, capture = build.build()
    return api.Library(dispatch), api.Library(capture)


@pytest.fixture
def aiter_on(libraries: tuple[api.Library, api.Library]) -> Any:
    """A function that returns AITER's compiled dispatch, set to a GPU of the given arch."""

    def on(arch: str) -> api.Library:
        libraries[0].set_hip_version(7)
        for gfx in build.ARCHS:
            libraries[0].set_asm_folder(gfx, build.asm_folder(gfx))
        libraries[0].set_gpu(arch)
        return libraries[0]

    return on


@pytest.fixture
def emulator(monkeypatch):
    """Lower calls on the CPU as on gfx942, and run them on the emulator of its kernels."""

    def device(platform: str):
        return device_for("rocm" if platform == "cpu" else platform)

    monkeypatch.setattr(primitive, "device_for", device)
    with (
        attn_dispatch.target("gfx942"),
        attn_dispatch.fallback("error"),
        aiter_emulated.arch("gfx942") as emulator,
    ):
        yield emulator
