"""Tries an installation on a machine without a GPU. Run it with the installation's Python.

usage: smoke.py none|PACKAGE

PACKAGE has the CUDA library: attn_dispatch_cuda13, for example, or attn_dispatch itself. "none":
there is no CUDA library.
"""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from attn_dispatch import dot_product_attention, explain
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices import native_libraries

expected = sys.argv[1]
installed = Path(attn_dispatch.__file__)
assert installed.is_relative_to(sys.prefix), installed

# XLA's results and gradients are those of jax.nn.
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(x, (2, 128, 4, 64), jnp.float32) for x in keys)


def loss(function):
    return jax.value_and_grad(lambda q: (function(q, k, v, is_causal=True) ** 2).sum())(q)


for ours, theirs in zip(
    loss(dot_product_attention), loss(jax.nn.dot_product_attention), strict=True
):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)

# The installed command runs.
command = Path(sys.executable).with_name("attn-dispatch")
info = subprocess.run([command, "info"], capture_output=True, text=True, check=True).stdout
assert f"attn_dispatch {attn_dispatch.__version__}, jax {jax.__version__}" in info, info

half = jax.ShapeDtypeStruct((2, 4096, 32, 128), jnp.bfloat16)
plan = explain(half, half, half, is_causal=True, target="b200")
if expected == "none":
    assert plan.chosen_forward == "unknown", plan
    assert "installed without its CUDA library" in " ".join(info.split()), info
    print("XLA")
    sys.exit()

name = native_libraries.load(native_libraries.CUDA).__name__
assert name == f"{expected}._cuda", name
found = cudnn_library.find()
assert found.is_usable, found.unusable_reason
assert plan.chosen_forward == plan.chosen_backward == "cudnn", plan
# cuDNN is named, because FlashAttention would run the call if its package is installed, too.
by_cudnn = functools.partial(dot_product_attention, is_causal=True, implementation="cudnn")
with attn_dispatch.target("h100"):
    step = jax.jit(jax.grad(lambda q: by_cudnn(q, q, q).sum()))
    lowered = step.trace(half).lower(lowering_platforms=("cuda",)).as_text()
assert lowered.count("@attn_dispatch_cudnn") >= 2, lowered[:2000]
print(f"plans with cuDNN {found.version_text}")
