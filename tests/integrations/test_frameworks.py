"""Each framework's attention layer compared with the same layer on our attention.

tests/scripts/integrations_table.py writes the `cell`s that the tests record into the table of
docs/integrations.md.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dropout_mask
from tests.support.backend import needs_cudnn
from tests.support.integration_layers import CAUSAL, LAYERS, MASK, RATE, X

Record = Callable[[str, object], None]

EACH = pytest.mark.parametrize("name", LAYERS)
_made: dict[Any, Any] = {}


def layer(name: str, rate: float = 0.0) -> Any:
    pytest.importorskip(LAYERS[name].package)
    if (name, rate) not in _made:
        _made[name, rate] = LAYERS[name].make(rate)
    return _made[name, rate]


def values_and_gradients(run: Any, params: Any, **arguments: Any) -> list[np.ndarray]:
    weights = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)

    @jax.jit
    def both(params, x):
        def loss(params, x):
            out = run(params, x, **arguments)
            return (out * weights).sum(), out

        gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return out, gradients

    leaves = jax.tree.leaves(both(params, jnp.asarray(X)))
    return [np.asarray(x) for x in leaves if x.dtype == np.float32]


def same(got: list[np.ndarray], expected: list[np.ndarray]) -> float:
    assert len(got) == len(expected) > 1
    worst = 0.0
    for x, y in zip(got, expected, strict=True):
        error, size = abs(x - y).max(), abs(y).max()
        # Some gradients are 0 up to rounding, such as that of a bias of the keys.
        assert error < 1e-5 * max(size, 1.0)
        worst = max(worst, error / max(size, 1.0))
    return worst


@EACH
@pytest.mark.parametrize(
    ("column", "arguments"),
    [
        ("plain", {}),
        ("mask", {"mask": MASK}),
        ("causal", {"is_causal": True}),
        ("mask and causal", {"mask": MASK, "is_causal": True}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_values_and_gradients_agree_with_the_framework(
    name: str, column: str, arguments: Any, record_property: Record
):
    params, original, ours = layer(name)
    masks = arguments | {"mask": MASK & CAUSAL} if len(arguments) == 2 else arguments
    expected = values_and_gradients(original, params, **masks)
    same(values_and_gradients(ours, params, **arguments), expected)
    if arguments:  # if the argument were ignored, the results would differ
        assert abs(values_and_gradients(ours, params)[0] - expected[0]).max() > 0.01
    record_property("cell", (name, column, "the same"))


@EACH
def test_the_layer_makes_our_call(name: str):
    params, original, ours = layer(name)
    assert str(jax.make_jaxpr(ours)(params, X)).count("attn_fwd[") in (1, 2)
    assert "attn_fwd[" not in str(jax.make_jaxpr(original)(params, X))


def by_formula(kept: list[Any]) -> Callable[..., jax.Array]:
    """Our call as a formula, with the dropout mask that the call draws."""

    def attend(query, key, value, **options):
        kept.append((options["dropout_rate"], options["dropout_key"]))
        keep = dropout_mask(query, key, value, **options)
        batch = query.shape[:-3]
        key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], -2) for x in (key, value))
        scores = jnp.einsum("...tnh,...snh->...nts", query, key) / np.sqrt(query.shape[-1])
        if options.get("mask") is not None:
            scores = jnp.where(options["mask"], scores, -jnp.inf)
        assert not options.get("is_causal")
        weights = jax.nn.softmax(scores) * keep / (1 - options["dropout_rate"])
        return jnp.einsum("...nts,...snh->...tnh", weights, value).reshape(
            *batch, *query.shape[-3:-1], -1
        )

    return attend


@contextlib.contextmanager
def our_call_as(name: str, function: Any, monkeypatch: pytest.MonkeyPatch):
    of_two = {"Flax NNX": "flax", "Flax Linen": "flax", "Keras 3": "keras"}
    file = f"{of_two[name]}.function" if name in of_two else name.lower()
    module = importlib.import_module(f"attn_dispatch.integrations.{file}")
    with monkeypatch.context() as patch:
        attends = "attend" if name == "Keras 3" else "dot_product_attention"
        patch.setattr(module, attends, function)
        yield


@EACH
def test_dropout_has_the_rate_and_key_of_the_framework(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without dropout the results are those of the framework."""
    if not LAYERS[name].has_dropout:
        pytest.skip("has no dropout")
    params, original, ours = layer(name, RATE)
    key, kept = jax.random.key(3), []
    got = values_and_gradients(ours, params, mask=MASK, key=key)
    without_implementation = by_formula(kept)

    def formula(*args: Any, implementation: Any = None, **options: Any):
        return without_implementation(*args, **options)

    with our_call_as(name, formula, monkeypatch):
        same(got, values_and_gradients(ours, params, mask=MASK, key=key))
    assert kept and all(rate == RATE and key is not None for rate, key in kept)
    again = values_and_gradients(ours, params, mask=MASK, key=key)
    np.testing.assert_array_equal(got[0], again[0])
    other = values_and_gradients(ours, params, mask=MASK, key=jax.random.key(4))
    assert abs(got[0] - other[0]).max() > 0.01
    without = values_and_gradients(ours, params, mask=MASK)
    same(without, values_and_gradients(original, params, mask=MASK))
    assert abs(got[0] - without[0]).max() > 0.01


def trained(run: Any, params: Any, key: Any = None) -> tuple[Any, list[float]]:
    """The parameters and losses of ten steps of SGD, on a task that attention can learn.

    Adam would make full steps along gradients that are 0 up to rounding.
    """
    optax = pytest.importorskip("optax")
    optimizer = optax.sgd(0.3, momentum=0.9)
    target = np.roll(X, 1, axis=1)

    @jax.jit
    def step(params, state, key):
        def loss(params):
            out = run(params, jnp.asarray(X), mask=MASK, key=key)
            return ((out - target) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for i in range(10):
        step_key = None if key is None else jax.random.fold_in(key, i)
        params, state, value = step(params, state, step_key)
        losses.append(float(value))
    return params, losses


@EACH
def test_training_agrees_with_the_framework(name: str, record_property: Record):
    params, original, ours = layer(name)
    theirs, expected = trained(original, params)
    got, losses = trained(ours, params)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < 0.95 * losses[0]
    moved = 0.0
    for x, y, start in zip(*map(jax.tree.leaves, (got, theirs, params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        moved = max(moved, float(abs(np.asarray(x) - np.asarray(start)).max()))
    assert moved > 0.01
    cell = "the same without dropout; has none" if not LAYERS[name].has_dropout else ""
    if LAYERS[name].has_dropout:
        params, _, ours = layer(name, RATE)
        losses = trained(ours, params, jax.random.key(5))[1]
        assert np.mean(losses[-3:]) < losses[0]
        cell = "the same at rate 0; loss falls with ours"
    record_property("cell", (name, "dropout training step", cell))


@EACH
def test_remat_by_name_runs_the_forward_pass_once(name: str, record_property: Record):
    params, _, ours = layer(name)
    policies = jax.checkpoint_policies
    counts, found = [], []
    for policy in (policies.save_only_these_names("context"), policies.nothing_saveable):

        def run(params, x, policy=policy):
            return jax.checkpoint(ours, policy=policy)(params, x)

        gradient = jax.grad(lambda x, run=run: run(params, x).sum())
        counts.append(str(jax.make_jaxpr(gradient)(jnp.asarray(X))).count("attn_fwd["))
        found.append(np.asarray(gradient(jnp.asarray(X))))
    assert counts == [1, 2]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    record_property("cell", (name, "remat", "forward once, by the name"))


@EACH
@needs_cudnn
def test_a_layer_in_bfloat16_lowers_to_cudnn(name: str):
    """Both passes lower to kernels, with a mask that is causal."""
    params, _, ours = layer(name)
    if name == "Keras 3":  # Keras casts inputs to the layer's dtype
        params, _, ours = LAYERS[name].make(dtype="bfloat16")

    def loss(params, x):
        params = jax.tree.map(
            lambda y: y.astype(jnp.bfloat16) if y.dtype == jnp.float32 else y, params
        )
        return ours(params, x, is_causal=True).astype(jnp.float32).sum()

    x = jnp.asarray(X, jnp.bfloat16)
    with attn_dispatch.target("sm90"), attn_dispatch.fallback("error"):
        traced = jax.jit(jax.grad(loss, 1)).trace(params, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "attn_dispatch_cudnn_forward" in text and "attn_dispatch_cudnn_backward" in text


def test_layers_on_a_mesh_agree_with_one_device(record_property: Record):
    """A process with eight CPU devices replicates parameters and shards batch and heads."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.integrations.on_a_mesh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if not found:
        pytest.skip("no framework is installed")
    for name, (error, shards) in found.items():
        assert error < 1e-5, name
        assert shards == 4, name
        record_property("cell", (name, "mesh", "the same, batch sharded"))
