"""Programs exported and lowered under an AbstractMesh, without devices, and run elsewhere."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import attn_dispatch
from attn_dispatch import AttentionShardingWarning, dot_product_attention, target
from tests.core.exported_programs import BY_HEAD, KINDS, NAMES, SIZES, SPECS, attend
from tests.support.backend import needs_cudnn
from tests.support.repository import environment

B, T, N, K, H = 8, 16, 4, 2, 8


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (1, N, T, T))
    floats = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return [*floats, rng.integers(1, T + 1, B).astype(np.int32)]


def sharded_shapes(given: list[Any], specs: Any, kind: AxisType, dtype: Any = None) -> list[Any]:
    """The arrays' shapes, sharded over a mesh without devices."""
    mesh = AbstractMesh(SIZES, NAMES, axis_types=(kind,) * 2)
    return [
        jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(given, specs, strict=True)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: Any) -> dict[str, Any]:
    """Errors of programs that this process exports with one device and another runs with eight."""
    assert len(jax.devices()) == 1
    folder = tmp_path_factory.mktemp("exported")
    np.savez(folder / "arrays.npz", *arrays())
    for name, kind in KINDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionShardingWarning)
            shapes = sharded_shapes(arrays(), SPECS, kind)
            exported = jax.export.export(jax.jit(attend), platforms=["cpu"])(*shapes)
            (folder / f"{name}.bin").write_bytes(exported.serialize(vjp_order=2))
        assert exported.nr_devices == 8
    script = pathlib.Path(__file__).with_name("exported_programs.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = environment(XLA_FLAGS=flags)
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_exported_program_runs_in_another_process(report, kind):
    found = report[f"{kind} exported"]
    assert set(found) == {"out", "gradients", "second"}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("order", ["first", "reversed"])
def test_program_lowered_without_devices_is_partitioned_when_compiled(report, order):
    assert report[f"{order} lowered"]["gradient"] < 1e-5
    assert report[f"{order} jitted"]["gradient"] < 1e-6
    assert report[f"{order} gathers"] == 0


def test_mesh_known_only_from_in_shardings_is_partitioned(report):
    assert report["in_shardings gathers"] == 0


def plain(q: Any, k: Any, v: Any) -> jax.Array:
    return dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("platform", "device", "custom_call"),
    [
        pytest.param("cuda", "h100", "attn_dispatch_cudnn", marks=needs_cudnn),
        ("rocm", "mi300x", "attn_dispatch_aiter"),
    ],
)
def test_export_and_lowering_for_absent_gpus(kind, platform, device, custom_call):
    """With Explicit axes the program holds one device's share; with Auto axes, the whole call."""
    shapes = sharded_shapes(arrays()[:3], (BY_HEAD,) * 3, KINDS[kind], jnp.float16)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"{custom_call}_{direction}")
        for direction in ("forward", "backward")
    ]
    with target(device), warnings.catch_warnings():
        warnings.simplefilter("ignore", attn_dispatch.AttentionShardingWarning)
        warnings.simplefilter("ignore", attn_dispatch.AttentionFallbackWarning)
        exported = jax.export.export(jax.jit(plain), platforms=[platform], disabled_checks=checks)(
            *shapes
        )
        exported.serialize(vjp_order=1)
        lowered = jax.jit(plain).trace(*shapes).lower(lowering_platforms=(platform,))
    text = exported.mlir_module()
    if custom_call not in text:
        pytest.skip(f"{custom_call} runs no call here")
    lines = [line for line in text.splitlines() if f"@{custom_call}" in line]
    rows = {int(x) for line in lines for x in re.findall(rf"tensor<(\d+)x{T}x\d+x{H}xf16>", line)}
    assert rows == {2 if kind == "Explicit" else 8}
    # A process with one device cannot partition along Auto axes; Explicit ones are in the types.
    assert custom_call in lowered.as_text()


def test_lowering_for_more_devices_than_present_warns():
    shapes = sharded_shapes(arrays()[:3], (BY_HEAD,) * 3, AxisType.Auto)
    with pytest.warns(AttentionShardingWarning, match="more devices than this process has"):
        jax.jit(lambda *x: 2 * plain(*x)).trace(*shapes).lower(lowering_platforms=("cpu",))


def test_export_with_auto_axes_warns_that_xla_splits_it():
    shapes = sharded_shapes(arrays()[:3], (BY_HEAD,) * 3, AxisType.Auto)
    with pytest.warns(AttentionShardingWarning, match="is exported from a program"):
        jax.export.export(jax.jit(lambda *x: 3 * plain(*x)), platforms=["cpu"])(*shapes)
