"""Exported modules that do not fit this library are refused, and the process goes on."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import mlir
from test_custom_call import CASE, arrays, attend

from attn_dispatch import cudnn

CHECKS = [jax.export.DisabledSafetyCheck.custom_call(cudnn.FORWARD_TARGET)]


def exported(platform: str = "cuda") -> jax.export.Exported:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays()]
    return jax.export.export(jax.jit(attend), platforms=(platform,), disabled_checks=CHECKS)(
        *shapes
    )


def edited(module: jax.export.Exported, pattern: str, replacement: str) -> jax.export.Exported:
    """With the one match of the pattern in its StableHLO replaced, serialized and read again."""
    text, count = re.subn(pattern, replacement, module.mlir_module())
    assert count == 1, (pattern, count, module.mlir_module())
    version = mlir_version(module)
    changed = dataclasses.replace(
        module, mlir_module_serialized=mlir.serialize_portable_artifact(text, version)
    )
    return jax.export.deserialize(changed.serialize())


def mlir_version(module: jax.export.Exported) -> str:
    """The version of StableHLO that the module was serialized for."""
    found = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", bytes(module.mlir_module_serialized))
    assert found
    return found[1].decode()


def run(module: jax.export.Exported) -> np.ndarray:
    return np.asarray(jax.block_until_ready(module.call(*arrays())), np.float32)


EDITS = {
    "an attribute is missing": (r"bends_scores = \w+, ", "", "missing bends_scores"),
    "one is unknown": (r"\bbatch = ", "bats = 1 : i64, batch = ", "unknown bats"),
    "one has another type": (r"\bbatch = (\d+) : i64", r"batch = \1.0 : f32", "batch: .* S64"),
    "there are more keys": (
        r"seq_len_kv = \d+ : i64",
        f"seq_len_kv = {2 * CASE.s} : i64",
        r"buffer \d+, \w+: expected \d+ bytes, got \d+",
    ),
    "the workspace is too small": (r"tensor<\d+xui8>", "tensor<1xui8>", "lower it again here"),
}
"""What is wrong -> pattern, replacement, what is said of it."""


@pytest.mark.parametrize("wrong", EDITS)
def test_edited_module(wrong: str):
    pattern, replacement, message = EDITS[wrong]
    module = exported()
    expected = np.asarray(jax.jit(attend)(*arrays()), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(edited(module, pattern, replacement))
    np.testing.assert_array_equal(run(module), expected)
    assert jnp.isfinite(expected).all()
