"""`jax.checkpoint` policies: how often a gradient computes the attention's forward pass.

Every test runs with both forms of `jax.checkpoint`; the new one is `jax_remat3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies

from attn_dispatch import dot_product_attention, explain_program, target
from tests.support.backend import needs_cudnn

B, T, N, H = 2, 32, 4, 16
_rng = np.random.default_rng(0)
X = _rng.standard_normal((B, T, N * H)).astype(np.float32)
W = _rng.standard_normal((4, N * H, N * H)).astype(np.float32) / 8


@pytest.fixture(autouse=True, params=[False, True], ids=["now", "remat3"])
def is_new(request: pytest.FixtureRequest) -> Iterator[bool]:
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", False)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = ((x @ w[i]).reshape(*x.shape[:2], N, H) for i in range(3))
    out = dot_product_attention(q, k, v, is_causal=True)
    return jnp.sin(out.reshape(x.shape) @ w[3])


CONTEXT = policies.save_only_these_names("context")
DOTS = policies.dots_saveable
OFFLOADED = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["context"],
    offload_src="device",
    offload_dst="pinned_host",
)

# Policies by how often a gradient computes the attention's forward pass.
ONCE = {
    "no remat": None,
    "names": CONTEXT,
    "dots and names": policies.save_from_both_policies(DOTS, CONTEXT),
    "everything": policies.everything_saveable,
    "offloaded names": OFFLOADED,
}
TWICE = {
    "nothing": policies.nothing_saveable,
    "dots": DOTS,
    "other names": policies.save_only_these_names("mlp"),
}
POLICIES = [(name, policy, 1) for name, policy in ONCE.items()] + [
    (name, policy, 2) for name, policy in TWICE.items()
]


def loss(policy: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    apply = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return (apply(apply(x, w), w) ** 2).sum()


@pytest.mark.parametrize(("name", "policy", "runs"), POLICIES)
@pytest.mark.parametrize("device", [pytest.param("sm90", marks=needs_cudnn), "gfx942"])
def test_number_of_kernels_in_the_lowered_gradient(name: str, policy: Any, runs: int, device: str):
    """Each of the two layers has `runs` forward kernels and one backward kernel."""
    del name
    platform, vendor = ("cuda", "cudnn") if device == "sm90" else ("rocm", "aiter")
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (X, W))

    def gradient(x, w):
        return jax.grad(lambda x, w: loss(policy, x, w).astype(jnp.float32), 1)(x, w)

    with target(device):
        text = jax.jit(gradient).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(rf"@attn_dispatch_{vendor}_(\w+)\(", text)
    assert calls.count("forward") == 2 * runs
    assert calls.count("backward") == 2


@pytest.mark.parametrize(("name", "policy", "runs"), POLICIES)
def test_primitives_and_values_of_the_gradient(name: str, policy: Any, runs: int):
    del name
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, 2), static_argnums=0)(policy, X, W))
    assert jaxpr.count("attn_fwd[") == 2 * runs
    assert jaxpr.count("attn_bwd[") == 2
    got = jax.jit(jax.grad(loss, 2), static_argnums=0)(policy, X, W)
    np.testing.assert_allclose(got, jax.grad(loss, 2)(None, X, W), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("policy", "runs"), [(CONTEXT, 1), (policies.nothing_saveable, 2)])
def test_policies_for_layers_in_a_scan(policy: Any, runs: int):
    def scanned(x, w):
        return (jax.lax.scan(jax.checkpoint(body, policy=policy), x, w)[0] ** 2).sum()

    def body(x, w):
        return layer(x, w), None

    stacked = np.stack([W, W])
    jaxpr = str(jax.make_jaxpr(jax.grad(scanned, 1))(X, stacked))
    assert jaxpr.count("attn_fwd[") == runs
    assert jaxpr.count("attn_bwd[") == 1
    got = jax.jit(jax.grad(scanned, 1))(X, stacked).sum(axis=0)
    np.testing.assert_allclose(got, jax.grad(loss, 2)(None, X, W), rtol=1e-4, atol=1e-5)


def test_names_policy_saves_only_out_and_lse(capsys):
    """What is saved beside the arguments is linear in the length."""
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(layer, policy=CONTEXT), X, W)  # pyright: ignore[reportAttributeAccessIssue]
    saved = [x for x in capsys.readouterr().out.splitlines() if "from the argument" not in x]
    shapes = sorted(re.findall(r"f32\[[\d,]*\]", "\n".join(saved)))
    assert shapes == sorted([f"f32[{B},{T},{N},{H}]", f"f32[{B},{N},{T}]"]), saved


def test_offloaded_results_leave_the_device():
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, 2), static_argnums=0)(OFFLOADED, X, W))
    for shape in (f"[{B},{T},{N},{H}]", f"[{B},{N},{T}]"):
        assert f"f32<host>{shape}" in jaxpr


def with_dropout(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = ((x @ w[i]).reshape(*x.shape[:2], N, H) for i in range(3))
    key = jax.random.key(0)
    out, lse = dot_product_attention(q, k, v, dropout_rate=0.3, dropout_key=key, return_lse=True)
    return jnp.sin(out.reshape(x.shape) @ w[3]) + lse.mean()


def with_bias(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = ((x @ w[i]).reshape(*x.shape[:2], N, H) for i in range(3))
    bias = jnp.einsum("ts,n->nts", w[0, :T, :T], jnp.arange(N) + 1.0)[None]
    out, largest = dot_product_attention(q, k, v, bias=bias, return_max_logits=True)
    return jnp.sin(out.reshape(x.shape) @ w[3]) + largest.mean()


LAYERS = {"dropout and lse": with_dropout, "bias": with_bias, "jit": jax.jit(layer)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mapped", ["not mapped", "vmap of grad", "grad of vmap"])
def test_calls_run_once_with_the_gradients_of_no_remat(name: str, mapped: str):
    def gradient(saving: Any) -> Any:
        apply = LAYERS[name] if saving is None else jax.checkpoint(LAYERS[name], policy=saving)

        def squared(x: jax.Array, w: jax.Array) -> jax.Array:
            return (apply(apply(x, w), w) ** 2).sum()

        if mapped == "grad of vmap":
            mean = jax.vmap(squared, (0, None))
            return jax.grad(lambda x, w: mean(x, w).mean(), (0, 1))
        found = jax.grad(squared, (0, 1))
        return jax.vmap(found, (0, None)) if mapped == "vmap of grad" else found

    x = X if mapped == "not mapped" else np.stack([X, -2 * X])
    calls = explain_program(gradient(CONTEXT), x, W).calls
    assert sum(x.forward_runs.times or 0 for x in calls) == 2
    assert sum(x.backward_runs.times or 0 for x in calls) == 2
    got, expected = (jax.jit(gradient(policy))(x, W) for policy in (CONTEXT, None))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_other_derivatives_have_the_saved_results():
    def derivatives(policy: Any) -> Any:
        def scalar(x: jax.Array) -> jax.Array:
            return loss(policy, x, jnp.asarray(W))

        def steepness(x: jax.Array) -> jax.Array:
            return (jax.grad(scalar)(x) ** 2).sum()

        x = jnp.asarray(X)
        along = jax.linearize(scalar, x)[1](x)
        return along, jax.jvp(jax.grad(scalar), (x,), (x,))[1], jax.grad(steepness)(x)

    for got, expected in zip(derivatives(CONTEXT), derivatives(None), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("policy", "runs"), [(CONTEXT, 2), (policies.nothing_saveable, 4)])
def test_explained_programs_have_the_runs_of_both_forms(policy: Any, runs: int):
    found = explain_program(jax.grad(lambda w: loss(policy, X, w)), W).calls
    assert sum(x.forward_runs.times or 0 for x in found) == runs
    assert sum(x.backward_runs.times or 0 for x in found) == 2
    (call,) = explain_program(lambda w: loss(policy, X, w), W).calls
    assert (call.forward_runs.times, call.backward_runs.times) == (2, 0)
