"""What attn_jvp is lowered to: a kernel for calls on one device, formulas for some others.

Programs run on the CPU as an H100 would be given them, on stand-ins for fa4's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    AttentionFallbackWarning,
    dot_product_attention,
    explain_program,
    fallback,
)
from attn_dispatch.core import select
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import TANGENT_TARGET
from tests.support.fa4_emulated import needs_computing_kernels
from tests.support.h100_of_stand_ins import h100
from tests.support.module_report import report_of

pytestmark = needs_computing_kernels

SM90 = parse("sm90")
_keys = jax.random.split(jax.random.key(0), 6)
SHAPES = ((2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64))
Q, K, V, TQ, TK, TV = (
    jax.random.normal(key, shape, jnp.bfloat16)
    for key, shape in zip(_keys, 2 * SHAPES, strict=True)
)
ARRAYS, TANGENTS = (Q, K, V), (TQ, TK, TV)


@pytest.fixture(autouse=True)
def _an_h100_of_stand_ins(monkeypatch):
    with h100(monkeypatch):
        yield


attention = partial(dot_product_attention, is_causal=True, implementation=("fa4", "xla"))
by_xla = partial(dot_product_attention, is_causal=True, implementation="xla")


def kernels_in(program: Callable[..., Any], *arrays: Any) -> int:
    return jax.jit(program).lower(*arrays).as_text().count(f"@{TANGENT_TARGET}")


def check(program: Callable[..., Any], *arrays: Any, kernels: int) -> None:
    """Compare a program of attention with XLA's in float32, and count its kernels of tangents."""
    assert kernels_in(partial(program, attention), *arrays) == kernels
    got = jax.jit(partial(program, attention))(*arrays)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = jax.jit(partial(program, by_xla))(*wide)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y)
        assert np.abs(x - y).max() <= 0.03 * np.abs(y).max()


def test_jvp_runs_on_the_kernel():
    check(lambda f, x, t: jax.jvp(f, x, t), ARRAYS, TANGENTS, kernels=1)


def test_the_tangent_of_lse_does_as_well():
    def program(f, x, t):
        return jax.jvp(partial(f, return_lse=True), x, t)

    check(program, ARRAYS, TANGENTS, kernels=1)


def test_tangents_that_are_known_to_be_zero_stay_zero():
    check(lambda f, x, t: jax.jvp(lambda k: f(x[0], k, x[2]), (x[1],), (t,)), ARRAYS, TK, kernels=1)


def test_further_leading_dims():
    unbatched = jax.tree.map(lambda x: x[0], (ARRAYS, TANGENTS))
    check(lambda f, x, t: jax.jvp(f, x, t), *unbatched, kernels=1)


def test_linearize_runs_on_the_kernel_and_its_transpose_on_the_backward_pass():
    def program(f, x, t):
        _, linear = jax.linearize(f, *x)
        return linear(*t), jax.linear_transpose(linear, *t)(t[0])

    check(program, ARRAYS, TANGENTS, kernels=1)
    _, pull = jax.vjp(attention, *ARRAYS)
    _, linear = jax.linearize(attention, *ARRAYS)
    got = jax.jit(jax.linear_transpose(linear, *TANGENTS))(TQ)
    for x, y in zip(got, pull(TQ), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_gradient_has_no_kernel_of_tangents():
    def program(f, x):
        return jax.grad(lambda x: (f(*x).astype(jnp.float32) ** 2).sum())(x)

    check(program, ARRAYS, kernels=0)


def test_the_gradient_of_a_tangent_is_right():
    """As in a training step whose loss has a tangent (MeanFlow)."""

    def program(f, x, t):
        def loss(x):
            out, moved = jax.jvp(f, x, t)
            return (out.astype(jnp.float32) * moved.astype(jnp.float32)).sum()

        return jax.grad(loss)(x)

    assert kernels_in(partial(program, attention), ARRAYS, TANGENTS) <= 1
    got = jax.jit(partial(program, attention))(ARRAYS, TANGENTS)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (ARRAYS, TANGENTS))
    expected = jax.jit(partial(program, by_xla))(*exact)
    for x, y in zip(got, expected, strict=True):
        assert np.abs(np.asarray(x, np.float32) - y).max() <= 0.05 * np.abs(y).max()


def test_a_tangent_without_gradient_in_a_training_step_runs_on_the_kernel():
    def program(f, x, t):
        def loss(x):
            out, moved = jax.jvp(f, x, t)
            goal = jax.lax.stop_gradient(moved.astype(jnp.float32))
            return ((out.astype(jnp.float32) - goal) ** 2).sum()

        return jax.value_and_grad(loss)(x)

    check(program, ARRAYS, TANGENTS, kernels=1)


@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": (3, 0)},
        {"mask": np.tril(np.ones((40, 40), bool), 1)},
        {"key_value_seq_lengths": np.array([40, 30])},
        {"sinks": np.ones(4, np.float32)},
        {"mask_mod": lambda b, n, t, s: s % 3 != 1},
    ],
    ids=lambda x: next(iter(x)),
)
def test_masks_and_sinks_run_on_the_kernel(options: dict[str, Any]):
    check(lambda f, x, t: jax.jvp(partial(f, **options), x, t), ARRAYS, TANGENTS, kernels=1)


def test_the_tangent_of_sinks():
    sinks = np.linspace(-1, 2, 4).astype(np.float32)

    def program(f, x, t):
        with_sinks = lambda sinks, *x: f(*x, sinks=sinks, return_lse=True)  # noqa: E731
        return jax.jvp(with_sinks, (sinks, *x), (sinks[::-1].copy(), *t))

    check(program, ARRAYS, TANGENTS, kernels=1)


@pytest.mark.parametrize(
    "options",
    [{"logits_soft_cap": 2.0}, {"bias": np.ones((1, 1, 40, 40), np.float32)}],
    ids=lambda x: next(iter(x)),
)
def test_other_calls_are_formulas(options: dict[str, Any]):
    check(lambda f, x, t: jax.jvp(partial(f, **options), x, t), ARRAYS, TANGENTS, kernels=0)


def jvp(attention: Callable[..., Any], *arrays: Any) -> Any:
    return jax.jvp(attention, arrays[:3], arrays[3:])


def test_a_named_kernel_refuses_what_only_formulas_compute():
    named = partial(dot_product_attention, is_causal=True, implementation="fa4")
    assert kernels_in(partial(jvp, named), *ARRAYS, *TANGENTS) == 1
    capped = partial(named, logits_soft_cap=3.0)
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap:[\s\S]*derivative"):
        kernels_in(partial(jvp, capped), *ARRAYS, *TANGENTS)
    with pytest.raises(NotImplementedError, match="none for a forward-mode derivative under vmap"):
        kernels_in(jax.vmap(partial(jvp, capped)), *(x[None] for x in (*ARRAYS, *TANGENTS)))


def test_the_warning_of_a_fallback_has_the_kernels_reason():
    capped = partial(dot_product_attention, is_causal=True, logits_soft_cap=2.0)
    with fallback("warn"), pytest.warns(AttentionFallbackWarning) as caught:
        kernels_in(partial(jvp, capped), *ARRAYS, *TANGENTS)
    texts = [str(x.message) for x in caught]
    assert any("kernel of the forward-mode derivative has none" in x for x in texts)


@pytest.fixture(scope="module")
def on_meshes() -> Any:
    return report_of("tests.core.tangents_on_meshes")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("one device", 1),
        ("Auto", 0),
        ("Explicit", 0),
        ("shard_map", 1),
        ("shard_map over one axis of two", 0),
        ("shard_map over heads", 1),
        ("shard_map, mapped", 1),
        ("Auto, rows and heads", 0),
        ("Auto, mapped", 0),
        ("Explicit, mapped", 0),
    ],
)
def test_several_devices_are_formulas_and_their_shards_run_on_the_kernel(
    on_meshes, name: str, kernels: int
):
    assert on_meshes[name]["kernels"] == kernels
    assert on_meshes[name]["error"] <= 0.03


def test_a_named_kernel_refuses_several_devices(on_meshes):
    assert "none for a forward-mode derivative over several devices" in on_meshes["named"]


def test_a_program_for_several_platforms_has_formulas():
    lowered = jax.jit(partial(jvp, attention)).trace(*ARRAYS, *TANGENTS)
    text = lowered.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert TANGENT_TARGET not in text


def test_without_the_kernels_the_program_is_formulas(monkeypatch):
    missing = compiled.CompiledLibrary(None, unusable_reason="they are not compiled")
    monkeypatch.setattr(compiled, "find", lambda: missing)
    select.is_installed.cache_clear()
    assert kernels_in(partial(jvp, dot_product_attention), *ARRAYS, *TANGENTS) == 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def test_explain_program_names_the_kernel_and_its_reasons():
    named = partial(dot_product_attention, is_causal=True, implementation="fa4")
    text = str(explain_program(partial(jvp, named), *ARRAYS, *TANGENTS, target="sm90"))
    assert "forward-mode derivative" in text and "kernel of the derivative" in _one_line(text)
    capped = partial(named, logits_soft_cap=3.0)
    text = str(explain_program(partial(jvp, capped), *ARRAYS, *TANGENTS, target="sm90"))
    assert "kernel of the forward-mode derivative has none" in _one_line(text)
