"""Names of targets as people write them, and the error for an unknown name."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import Release
from attn_dispatch.devices.target import PRODUCTS, default_device, parse
from attn_dispatch.reason import sentences


@pytest.mark.parametrize(
    ("name", "arch", "product"),
    [
        ("h100", "sm90", "NVIDIA H100"),
        ("H100", "sm90", "NVIDIA H100"),
        ("NVIDIA H100 80GB HBM3", "sm90", "NVIDIA H100"),
        ("h200", "sm90", "NVIDIA H200"),
        ("sm_90", "sm90", "NVIDIA H200"),
        ("sm90a", "sm90", "NVIDIA H200"),
        ("compute_100f", "sm100", "NVIDIA B200"),
        ("b200", "sm100", "NVIDIA B200"),
        ("b300", "sm103", "NVIDIA B300"),
        ("a100", "sm80", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM4-40GB", "sm80", "NVIDIA A100-SXM4-80GB"),
        ("l4", "sm89", "NVIDIA L4"),
        ("l40s", "sm89", "NVIDIA L40S"),
        ("rtx4090", "sm89", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 5090", "sm120", "NVIDIA GeForce RTX 5090"),
        ("mi300x", "gfx942", "AMD Instinct MI300X"),
        ("mi325x", "gfx942", "AMD Instinct MI325X"),
        ("AMD Instinct MI355X", "gfx950", "AMD Instinct MI355X"),
        ("gfx950", "gfx950", "AMD Instinct MI350"),
    ],
)
def test_name_gives_arch_and_product(name: str, arch: str, product: str):
    device = parse(name)
    assert (device.arch, device.name, device.is_present) == (arch, product, False)
    assert device.platform == ("rocm" if arch.startswith("gfx") else "cuda")


@pytest.mark.parametrize(("name", "platform"), [("cpu", "cpu"), ("CPU", "cpu"), ("tpu", "other")])
def test_only_xla_runs_on_cpu_and_tpu(name: str, platform: str):
    array = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    found = attn_dispatch.explain(array, array, array, target=name)
    assert (found.device.platform, found.device.arch) == (platform, name.lower())
    assert found.chosen_forward == found.chosen_backward == "xla"
    for verdict in found.forward:
        is_xla = verdict.implementation == "xla"
        assert is_xla or f"and this is {name.upper()} ({name.lower()}" in sentences(verdict.reasons)


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_has_a_known_arch(name: str):
    arch, product = PRODUCTS[name]
    assert parse(name).arch == parse(arch).arch == arch
    assert parse(product).arch == arch
    if arch.startswith("sm"):
        version = json.loads(parse(name).properties or "")["deviceVer"]
        assert f"sm{version // 10}" == arch


def test_text_of_a_target_names_the_gpu_planned_for():
    assert str(parse("h100")) == "NVIDIA H100 (sm90, planned as an NVIDIA H200, not present)"
    assert str(parse("h200")) == "NVIDIA H200 (sm90, planned for, not present)"
    assert parse("h100").properties == parse("h200").properties


@pytest.mark.parametrize("name", ["mi300x:aiter0.1.20.post1", "MI300X : AITER v0.1.20.post1"])
def test_a_target_may_name_aiters_version(name: str):
    device = parse(name)
    assert device.library == ("AITER", "0.1.20.post1")
    assert aiter_folder.releases_for(device) == (Release("v0.1.15", (0, 1, 20)),)
    text = "AMD Instinct MI300X (gfx942, planned for, with AITER 0.1.20.post1, not present)"
    assert str(device) == text


def test_the_version_of_a_target_decides_what_runs():
    array = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.float16)
    versions = ("", ":aiter0.1.7", ":aiter0.1.19")
    found = [attn_dispatch.explain(array, array, array, target=f"gfx950{x}") for x in versions]
    assert [x.chosen_forward for x in found] == ["aiter", "aiter", "xla"]
    assert [dict(x.versions)["AITER"] for x in found[1:]] == ["0.1.7", "0.1.19"]
    (why,) = (x.reasons for x in found[2].forward if x.implementation == "aiter")
    assert "built without CK" in sentences(why) and "needs bfloat16" in sentences(why)


@pytest.mark.parametrize(
    "version, is_tried",
    [("0.1.7", True), ("0.1.20.post1", True), ("0.1.21", False),
     ("0.2.0", False), ("1.0.0", False)],
)  # fmt: skip
def test_explain_says_that_a_version_was_not_tried(version: str, is_tried: bool):
    array = jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16)
    found = attn_dispatch.explain(array, array, array, target=f"mi300x:aiter{version}")
    doubt = f"(AITER v{version} has not been tried; the newest that was is v0.1.20)"
    assert found.chosen_forward == found.chosen_backward == "aiter"
    text = " ".join(str(found).split())
    assert text.count(doubt) == (0 if is_tried else 2) and ("tried" in text) != is_tried


def test_product_and_arch_name_the_same_target(monkeypatch):
    array = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    of_arch = attn_dispatch.explain(array, array, array, target="gfx942")
    of_product = attn_dispatch.explain(array, array, array, target="MI300X")
    plans = [[x.plan for x in found.forward] for found in (of_arch, of_product)]
    assert plans[0] == plans[1] and any(plans[0])
    monkeypatch.setenv("ATTN_DISPATCH_TARGET", "h100,mi300x")
    with attn_dispatch.target("b200"):
        assert default_device().arch == "sm100"
