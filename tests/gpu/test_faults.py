"""Modules that do not fit this library, and full memory, are errors that the process survives."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import mlir

from attn_dispatch import cudnn
from tests.support.exported_case import CASE, arrays, attend

CHECKS = [jax.export.DisabledSafetyCheck.custom_call(cudnn.FORWARD_TARGET)]


def exported(platform: str = "cuda") -> jax.export.Exported:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays()]
    return jax.export.export(jax.jit(attend), platforms=(platform,), disabled_checks=CHECKS)(
        *shapes
    )


def edited(module: jax.export.Exported, pattern: str, replacement: str) -> jax.export.Exported:
    """Replace the one match of a pattern in the module's StableHLO, serialize it and read it."""
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
"""The pattern, the replacement and the message, by a description of the error."""


@pytest.mark.parametrize("wrong", EDITS)
def test_an_edited_module_is_refused_and_the_original_runs(wrong: str):
    pattern, replacement, message = EDITS[wrong]
    module = exported()
    expected = np.asarray(jax.jit(attend)(*arrays()), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(edited(module, pattern, replacement))
    np.testing.assert_array_equal(run(module), expected)
    assert jnp.isfinite(expected).all()


FULL_MEMORY = """
import sys
import jax, jax.numpy as jnp, numpy as np
import attn_dispatch

room = int(sys.argv[1])
value = np.random.default_rng(0).standard_normal((2, 512, 8, 64)).astype(jnp.bfloat16)
zeros = jnp.zeros_like(value)
value = jnp.asarray(value)
# Every weight is 1 / 512.
expected = np.broadcast_to(np.asarray(value, np.float32).mean(1, keepdims=True), value.shape)
run = jax.jit(
    lambda q, k, v: attn_dispatch.dot_product_attention(q, k, v, implementation="cudnn")
).lower(zeros, zeros, value).compile()
free = room and jnp.zeros(room, jnp.int8).block_until_ready()
held, size = [], 2**34
while size >= 2**16:
    try:
        held.append(jnp.zeros(size, jnp.int8).block_until_ready())
    except jax.errors.JaxRuntimeError:
        size //= 2
if room:
    free.delete()
try:
    run(zeros, zeros, value).block_until_ready()
    print("ran", end=", ")
except jax.errors.JaxRuntimeError as error:
    print("failed:", str(error).splitlines()[0][:200], end=", ")
for x in held:
    x.delete()
for _ in range(2):
    got = np.asarray(run(zeros, zeros, value), np.float32)
    np.testing.assert_allclose(got, expected, atol=2e-3)
print("then right")
"""


@pytest.mark.parametrize("room", [0, 2**21, 2**23, 2**25, 2**27])
def test_a_call_fails_in_full_memory_and_is_right_afterwards(record, room: int):
    """The first call has `room` bytes for its results, cuDNN's handle and the kernel."""
    environment = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", FULL_MEMORY, str(room)],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = done.stdout.splitlines()[-1]
    record(room=room, outcome=outcome)
    assert outcome.endswith(", then right")
    assert room or outcome.startswith("failed: RESOURCE_EXHAUSTED"), outcome
