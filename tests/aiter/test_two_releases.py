"""Calls where two releases of AITER are built: v0.1.15 or later, and dev18, whose CK runs what ASM
kernels do not.

The CPU stands in for an AMD GPU. The emulator is loaded as the library of both generations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import aiter, dot_product_attention, explain
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import library as aiter_library
from attn_dispatch.aiter.call import call_of
from attn_dispatch.aiter.kernels import kernel_of_first
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.devices.device import Device
from attn_dispatch_tools.verify.case import spec_of
from tests.support.aiter_cases import AITER_CASES
from tests.support.aiter_public import assert_close, value_and_gradients
from tests.support.fake_aiter import shared_library

NEWER = Release("v0.1.15", (0, 1, 20))
BIAS: dict[str, Any] = {"bias": np.full((4, 24, 40), 0.25, jnp.bfloat16)}
LENGTHS: dict[str, Any] = {
    "key_value_seq_lengths": np.array([37, 8]), "query_seq_lengths": np.array([20, 24])
}  # fmt: skip
SEGMENTS: dict[str, Any] = {
    "query_segment_ids": np.repeat([[1, 2, 4], [0, 1, 1]], 8, axis=1),
    "key_value_segment_ids": np.repeat([[0, 1, 3, 4], [1, 1, 2, 0]], 10, axis=1),
    "max_segments": 4,
}


def _arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(7)
    shapes = ((2, 24, 4, 128), (2, 40, 2, 128), (2, 40, 2, 128))
    return tuple(jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in shapes)


@pytest.fixture
def both(emulator, monkeypatch):
    monkeypatch.setattr(aiter_folder, "releases", lambda arch: (NEWER, DEV18))
    return emulator


OF_CK: dict[str, dict[str, Any]] = {
    "bias": BIAS,
    "segments under a soft cap": {**SEGMENTS, "logits_soft_cap": 5.0},
    "segments with a window": {**SEGMENTS, "local_window_size": (3, 2)},
}


@pytest.mark.parametrize("options", OF_CK.values(), ids=OF_CK)
def test_ck_of_dev18_runs_what_asm_does_not(both, options):
    got = dot_product_attention(*_arrays(), **options).block_until_ready()
    call = both.last_call("forward").call
    assert not call.use_asm and not call.cu_seqlen_q
    assert bool(call.seqlen_q) == bool(call.is_group) == (options is not BIAS)
    expected = dot_product_attention(*_arrays(), **options, implementation="xla")
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=2e-2
    )


def test_heads_are_not_padded_for_asm_where_ck_has_kernels_for_them(both):
    dot_product_attention(*(x[..., :64] for x in _arrays())).block_until_ready()
    call = both.last_call("forward").call
    assert (call.use_asm, call.head_dim) == (0, 64)


def test_passes_of_one_call_run_on_both(both):
    """The forward pass on ASM, and deterministic gradients, which only CK computes."""
    options = {**LENGTHS, "deterministic_backward": True}
    got = value_and_gradients(*_arrays(), **options)
    forward, backward = (both.last_call(x).call for x in ("forward", "backward"))
    assert forward.use_asm and forward.cu_seqlen_q and not forward.seqlen_q
    assert not backward.use_asm and backward.seqlen_q and not backward.cu_seqlen_q
    assert_close(got, value_and_gradients(*_arrays(), **options, implementation="xla"))


def test_explain_names_the_release_and_the_reasons_of_the_newer(both):
    said = str(explain(*_arrays(), **BIAS))
    assert "ck of AITER v0.1.7 (not asm: no ASM kernel has a bias" in said
    said = str(explain(*_arrays(), **LENGTHS))
    assert "asm v3 bf16" in said and "of AITER" not in said


def test_asm_of_dev18_runs_what_a_newer_kernel_computes_wrong():
    """A bottom-right mask on gfx950, whose newer kernel writes beyond the gradients of keys."""
    case = replace(next(x for x in AITER_CASES if x.name == "asm"), t=280, s=300, is_causal=True)
    case = replace(case, alignment="bottom_right")
    given = case.operands() | case.cotangents() | {"lse": np.zeros((1, case.n, 280), np.float32)}
    call = call_of(spec_of(case.backward_options(), given | {"out": given["out_grad"]}))
    kernel = kernel_of_first(call, "gfx950", (NEWER, DEV18))
    assert (kernel.family, kernel.release, kernel.why_not_asm) == ("asm", DEV18, ())
    assert str(kernel) == "asm v3 bf16, rounding nearest even, fp32 atomics of AITER v0.1.7"
    assert kernel_of_first(call, "gfx942", (NEWER, DEV18)).release == NEWER


def test_what_neither_runs_has_the_reasons_of_ck(both):
    said = str(explain(*_arrays(), **BIAS, logits_soft_cap=5.0))
    assert "CK has no logits_soft_cap together with bias" in said and "without CK" not in said


# The builds.


@pytest.fixture
def builds(tmp_path: Path, monkeypatch) -> dict[str, Path]:
    """The folders of two builds for gfx942, by generation."""
    monkeypatch.delenv("ATTN_DISPATCH_AITER", raising=False)
    monkeypatch.setattr(aiter_folder.user_folders, "data", lambda: tmp_path)
    record = aiter_folder.AiterBuild(
        "dev18", "gfx942", "0.1.7.post2.dev18", "", "", "", "hipcc", False, 9, 0, ""
    )
    folders = {x: tmp_path / "aiter" / x / "gfx942" for x in ("dev18", "v0.1.15")}
    for generation, folder in folders.items():
        (folder / "hsa" / "gfx942").mkdir(parents=True)
        (folder / aiter_folder.ADAPTER).write_bytes(shared_library())
        version = {"dev18": record.wheel_version, "v0.1.15": "0.1.20"}[generation]
        replace(record, generation=generation, wheel_version=version).write(folder)
    return folders


def test_both_builds_are_used(builds):
    assert aiter_folder.releases("gfx942") == (NEWER, DEV18)
    assert aiter_folder.folder_of(NEWER, "gfx942") == builds["v0.1.15"]
    assert aiter_folder.folder_of(DEV18, "gfx942") == builds["dev18"]
    assert aiter_folder.version() == "0.1.20 and 0.1.7.post2.dev18"
    lines = aiter.library_lines()
    assert [x.split(" for")[0] for x in lines] == ["AITER 0.1.20", "AITER 0.1.7.post2.dev18"]


def test_one_build_is_used_alone(builds, monkeypatch):
    assert aiter_folder.releases("gfx950") == (DEV18,)
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(builds["v0.1.15"].parent))
    assert aiter_folder.releases("gfx942") == (NEWER,)
    monkeypatch.delenv("ATTN_DISPATCH_AITER")
    (builds["v0.1.15"] / "build.json").unlink()
    assert aiter_folder.releases("gfx942") == (DEV18,)


@pytest.fixture
def loaded(builds, monkeypatch) -> Iterator[list[Path]]:
    """The libraries that a stand-in of `_rocm` has loaded; that of dev18 fails to."""
    paths: list[Path] = []

    def load_aiter(path: Path, arch: str) -> None:
        paths.append(path)
        if "dev18" in str(path):
            raise RuntimeError("libmha_fwd_gfx942.so: undefined symbol")

    backend = SimpleNamespace(load_aiter=load_aiter)
    monkeypatch.setattr(aiter_library.native_libraries, "load", lambda native: backend)
    aiter_library._load.cache_clear()
    yield paths
    aiter_library._load.cache_clear()


def _reasons(name: str) -> list[str]:
    """The reasons against a case of AITER's on a GPU that is present."""
    case = next(x for x in AITER_CASES if x.name == name)
    spec = spec_of(case.forward_options(), case.operands())
    present = Device("rocm", "gfx942", "AMD Instinct MI300X")
    return [str(x) for x in aiter.not_supported_reasons(spec, present)]


def test_a_second_library_that_does_not_load_is_a_reason_for_its_calls_alone(loaded, builds):
    assert _reasons("asm") == []
    assert loaded == [builds["v0.1.15"] / aiter_folder.ADAPTER]
    *why_not_asm, why_not_ck = _reasons("bias")
    assert "no ASM kernel has a bias (this AITER is built without CK)" in why_not_asm
    assert "undefined symbol" in why_not_ck
