"""Sinks in FlashAttention-4's kernels: whole calls with copies of the kernels on this CPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import explain
from attn_dispatch.core.rewrites.sinks import SINKS_AFTERWARDS
from attn_dispatch.fa4 import compiled, interval_calls, rules
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.fa4_on_cpu import LIBRARY, for_h200, install

SHAPES = ((2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8))
ROWS = {"is_causal": True, "key_value_seq_lengths": np.asarray([9, 0], np.int32)}
BITS = {"mask": np.random.default_rng(1).random((2, 4, 11, 11)) < 0.2}


def drawn(dtype: str) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return [jax.random.normal(x, y, dtype) for x, y in zip(keys, SHAPES, strict=True)]


def results(arrays: list[jax.Array], sinks: jax.Array, implementation: str, options: dict):
    """out, lse, and the gradients of everything from both."""

    def both(*given: jax.Array):
        q, k, v, sinks = given
        return attn_dispatch.dot_product_attention(
            q, k, v, sinks=sinks, return_residual=True, implementation=implementation, **options
        )

    def run(*given: jax.Array):
        found, pull = jax.vjp(both, *given)
        return *found, *pull(jax.tree.map(lambda x: jnp.where(x == -jnp.inf, 0, jnp.sin(x)), found))

    return jax.jit(run)(*arrays, sinks)


@pytest.mark.parametrize("options", [ROWS, BITS], ids=["rows", "bits"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_whole_calls_with_sinks_agree_with_xla(monkeypatch, options: dict, shape):
    install(monkeypatch)
    seen = []
    forward = interval_calls.forward

    def noted(*given):
        seen.append(given[-1])
        return forward(*given)

    monkeypatch.setattr(interval_calls, "forward", noted)
    sinks = 3 * jax.random.normal(jax.random.key(9), shape)
    expected = results(drawn("float32"), sinks, "xla", options)
    assert not seen
    with for_h200():
        got = results(drawn("float32"), sinks, "fa4", options)
    assert [x.shape for x in seen] == [(1, 4) if len(shape) == 1 else shape]
    assert jnp.isneginf(got[1]).any()
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", [-np.inf, -1e4, 1e4])
def test_sinks_of_any_size(monkeypatch, value: float):
    install(monkeypatch)
    sinks = jnp.asarray([value, 0.0, value, 1.0])
    expected = results(drawn("float32"), sinks, "xla", ROWS)
    with for_h200():
        got = results(drawn("float32"), sinks, "fa4", ROWS)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_have_the_dtype_of_the_sinks(monkeypatch, dtype: str):
    install(monkeypatch)
    with for_h200():
        got = results(drawn("bfloat16"), jnp.linspace(-2, 2, 4).astype(dtype), "fa4", ROWS)
    assert [x.dtype for x in got[2:]] == [*["bfloat16"] * 3, dtype]


def test_kernels_that_take_no_sinks_leave_them_to_a_rewrite(monkeypatch):
    arrays = [jax.ShapeDtypeStruct(x, "bfloat16") for x in SHAPES]
    without = replace(LIBRARY, sets=tuple(replace(x, takes_sinks=False) for x in LIBRARY.sets))
    for library, steps in ((LIBRARY, ()), (without, (SINKS_AFTERWARDS.name,))):
        monkeypatch.setattr(compiled, "find", lambda library=library: library)
        found = explain(*arrays, implementation="fa4", target="sm90", sinks=jnp.ones(4))
        for (verdict,) in (found.forward, found.backward):
            assert (verdict.reasons, verdict.rewrites) == ((), steps)
    case = Case("sinks", sinks=1, dtype="bfloat16")
    spec = spec_of(case.forward_options(), case.avals())
    sentences = [str(x) for x in rules.not_supported_reasons(spec, without)]
    assert sentences == ["sinks: kernels for sm90 take none"]
