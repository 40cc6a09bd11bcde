"""Public calls with AITER v0.1.15 or later, where ASM kernels are all that is built.

The CPU stands in for an AMD GPU. The emulator takes lengths of packed sequences as prefix sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, explain
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import DEV18, Release
from tests.support.aiter_public import assert_close, value_and_gradients

SEGMENTS = {
    "query_segment_ids": np.repeat([[1, 2, 4], [0, 1, 1]], 8, axis=1),
    "key_value_segment_ids": np.repeat([[0, 1, 3, 4], [1, 1, 2, 0]], 10, axis=1),
    "max_segments": 4,
}
BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}
CALLS: dict[str, dict[str, Any]] = {
    "dense": BOTTOM_RIGHT,
    "key lengths": {"key_value_seq_lengths": np.array([13, 0])},
    "lengths": {
        "key_value_seq_lengths": np.array([37, 8]), "query_seq_lengths": np.array([20, 24])
    },
    "segments": SEGMENTS,
    "causal segments": {**SEGMENTS, **BOTTOM_RIGHT},
}  # fmt: skip


NEWER = Release("v0.1.15", (0, 1, 20))


@pytest.fixture(autouse=True)
def newer(emulator, monkeypatch):
    """AITER v0.1.20 is what is built."""
    monkeypatch.setattr(aiter_folder, "release", lambda arch: NEWER)


def _arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(7)
    shapes = ((2, 24, 4, 128), (2, 40, 2, 128), (2, 40, 2, 128))
    return tuple(jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in shapes)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_packed_calls_with_gaps_run_on_asm_both_ways(emulator, options):
    got = value_and_gradients(*_arrays(), **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    for direction in ("forward", "backward"):
        call = emulator.last_call(direction).call
        assert call.use_asm and not call.seqlen_q
        assert bool(call.cu_seqlen_q) == bool(call.is_group) == (options is not BOTTOM_RIGHT)
    assert_close(got, value_and_gradients(*_arrays(), **options, implementation="xla"))


def test_a_call_of_ck_is_xlas_and_says_why(emulator):
    bias = jnp.zeros((4, 24, 40), jnp.bfloat16)
    why = explain(*_arrays(), bias=bias)
    assert "no ASM kernel has a bias (this AITER is built without CK)" in str(why)
    with attn_dispatch.fallback("silent"):
        dot_product_attention(*_arrays(), bias=bias)
    assert emulator.calls("forward") == 0


@pytest.mark.parametrize(
    "options", [{"logits_soft_cap": 5.0}, {"sinks": jnp.ones(4)}], ids=["soft cap", "sinks"]
)
def test_what_asm_would_drop_is_in_values_and_gradients(emulator, options: dict[str, Any]):
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*_arrays(), **options)
        assert_close(got, value_and_gradients(*_arrays(), **options, implementation="xla"))
    calls = emulator.calls("forward"), emulator.calls("backward")
    assert calls == ((0, 0) if "logits_soft_cap" in options else (1, 1))


def test_a_program_of_another_generation_is_refused(emulator, monkeypatch):
    monkeypatch.setattr(aiter_folder, "release", lambda arch: DEV18)
    run = jax.jit(lambda *x: dot_product_attention(*x)).lower(*_arrays())
    emulator.set_generation("v0.1.99")
    with pytest.raises(Exception, match=r"dev18, and loaded is v0\.1\.99 and v0\.1\.15; lower it"):
        run.compile()(*_arrays())
