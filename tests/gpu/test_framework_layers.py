"""Each framework's layer with our attention on kernels, in bfloat16, compared in float32.

The expected results are those of the framework's attention in float32. Our errors may be 1.5 times
as large as those of the framework's attention in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import cudnn, fa4, flash
from attn_dispatch.devices.target import default_device
from tests.support import integration_layers
from tests.support.integration_layers import LAYERS

B, T, N, K, D = 2, 300, 8, 2, 512
RATE = 0.2
LEARNING_RATE = 10

_rng = np.random.default_rng(11)
X = _rng.standard_normal((B, T, D)).astype(np.float32)
MASK = (_rng.random((B, 1, T, T)) < 0.5) | np.eye(T, dtype=bool)
CAUSAL = np.tril(np.ones((T, T), bool))[None, None]
WEIGHTS = _rng.standard_normal(X.shape).astype(np.float32)

ArrayList = list[np.ndarray]


@pytest.fixture(autouse=True)
def on_cudnn(monkeypatch: pytest.MonkeyPatch):
    if reason := cudnn.unusable_reason(default_device()):
        pytest.skip(reason)
    sizes = {"B": B, "T": T, "N": N, "K": K, "D": D, "X": X, "MASK": MASK, "CAUSAL": CAUSAL}
    for name, size in sizes.items():
        monkeypatch.setattr(integration_layers, name, size)
    with attn_dispatch.fallback("error"):
        yield


def layer(name: str, rate: float = 0.0, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    pytest.importorskip(LAYERS[name].package)
    # Keras casts its inputs to the dtype of the layer.
    more = {"dtype": jnp.dtype(dtype).name} if name == "Keras 3" else {}
    params, original, ours = LAYERS[name].make(rate, **more)
    floats = (jnp.float32, jnp.bfloat16)
    return (
        jax.tree.map(lambda x: x.astype(dtype) if x.dtype in floats else x, params),
        original,
        ours,
    )


def has_kernels(text: str) -> bool:
    """Whether kernels of ours run both passes of a compiled program."""
    forward = (cudnn.FORWARD_TARGET, flash.FORWARD_TARGET, fa4.FORWARD_TARGET)
    backward = (cudnn.BACKWARD_TARGET, flash.BACKWARD_TARGET, fa4.BACKWARD_TARGET)
    return all(any(x in text for x in targets) for targets in (forward, backward))


def in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def step(run: Callable[..., jax.Array], params: Any, x: jax.Array, **arguments: Any) -> Any:
    def loss(params, x):
        out = run(params, x, **arguments).astype(jnp.float32)
        return (out * WEIGHTS).sum(), out

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(params, x).compile()


def results(compiled: Any, params: Any, x: jax.Array) -> ArrayList:
    gradients, out = compiled(params, x)
    return [np.asarray(x, np.float32) for x in (out, *jax.tree.leaves(gradients)) if x.ndim]


def errors(got: ArrayList, expected: ArrayList) -> np.ndarray:
    """The error of each array as a share of its largest number.

    The gradient of a bias of the keys is 0, so that all of it is rounding, which differs by a
    factor of two between runs of one framework. Its error is a share of a tenth of the largest
    number of the others.
    """
    sizes = [abs(y).max() for y in expected]
    largest = [max(size, max(sizes) / 10) for size in sizes]
    pairs = zip(got, expected, largest, strict=True)
    return np.array([abs(x - y).max() / scale for x, y, scale in pairs])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("column", ["plain", "mask", "causal", "mask and causal"])
def test_errors_are_like_those_of_the_framework(
    name: str, column: str, record: Callable[..., None]
):
    arguments = {"mask": MASK} if "mask" in column else {}
    arguments |= {"is_causal": True} if "causal" in column else {}
    # Flax's layers take a mask or is_causal, so that both are one mask there.
    both = {"mask": MASK & CAUSAL} if len(arguments) == 2 else arguments
    params, original, ours = layer(name, dtype=jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.map(in_float32, (params, x))
        expected = results(step(layer(name)[1], *exact, **both), *exact)
    compiled = step(original, params, x, **both)
    assert cudnn.FORWARD_TARGET not in compiled.as_text()
    theirs = errors(results(compiled, params, x), expected)
    compiled = step(ours, params, x, **arguments)
    assert has_kernels(compiled.as_text())
    found = errors(results(compiled, params, x), expected)
    record(name=name, arguments=column, ours=found.max().item(), own=theirs.max().item())
    assert theirs[0] < 0.03, "the parameters differ"
    assert (found <= 1.5 * theirs + 2e-3).all(), (found, theirs)


@pytest.mark.parametrize("name", [x for x in LAYERS if LAYERS[x].has_dropout])
def test_training_with_dropout_lowers_the_loss(name: str, record: Callable[..., None]):
    params, _, ours = layer(name, RATE, jnp.bfloat16)
    x, target = jnp.asarray(X, jnp.bfloat16), np.roll(X, 1, axis=1)

    @jax.jit
    def train(params, key):
        def loss(params):
            return ((ours(params, x, mask=MASK, key=key) - target) ** 2).mean()

        value, gradients = jax.value_and_grad(loss, allow_int=True)(params)
        moved = jax.tree.map(
            lambda p, g: p - LEARNING_RATE * g if g.dtype == p.dtype else p, params, gradients
        )
        return moved, value

    losses = []
    for i in range(20):
        params, value = train(params, jax.random.fold_in(jax.random.key(0), i))
        losses.append(float(value))
    record(name=name, first=losses[0], last=losses[-1])
    assert np.isfinite(losses).all() and losses[-1] < 0.995 * losses[0]


def test_decoding_with_flax_cache_agrees_with_flax(record: Callable[..., None]):
    """The cache passes a mask of the keys so far, which cuDNN runs."""
    nnx = pytest.importorskip("flax.nnx")
    from attn_dispatch.integrations.flax import attention_fn

    x, outs = jnp.asarray(X[:, :24], jnp.bfloat16), []
    for more in ({}, {"attention_fn": attention_fn}):
        layer = nnx.MultiHeadAttention(
            N,
            D,
            decode=True,
            rngs=nnx.Rngs(0),
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            **more,
        )
        layer.init_cache(x.shape, jnp.bfloat16)
        outs.append(np.stack([np.asarray(layer(x[:, i : i + 1]), np.float32) for i in range(24)]))
    error = abs(outs[1] - outs[0]).max() / abs(outs[0]).max()
    record(error=error.item())
    assert error < 0.02
