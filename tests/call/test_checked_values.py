"""ATTN_DISPATCH_CHECK=1 checks traced values too, when the program runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    AttentionConventionWarning,
    dot_product_attention,
    explain,
    ragged_dot_product_attention,
    settings,
)

X = np.random.default_rng(0).standard_normal((2, 4, 2, 8), np.float32)
VALID_IDS, WRONG_IDS = np.array([[1, 1, 2, 2]] * 2), np.array([[1, 1, 2, 2], [1, 1, -1, 2]])


@pytest.fixture(autouse=True)
def _enable_check(monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_CHECK", "1")


def attend(x, ids):
    return dot_product_attention(x, x, x, query_segment_ids=ids)


def attend_each_row(x, ids):
    return jax.vmap(attend)(x[:, None], ids[:, None])


TRANSFORMED = {
    "jit": jax.jit(attend),
    "vmap": attend_each_row,
    "jit of vmap": jax.jit(attend_each_row),
    "grad": jax.grad(lambda x, ids: attend(x, ids).sum()),
    "jit of grad": jax.jit(jax.grad(lambda x, ids: attend(x, ids).sum())),
    "jit of grad of vmap": jax.jit(jax.grad(lambda x, ids: attend_each_row(x, ids).sum())),
    "checkpoint": jax.jit(jax.grad(lambda x, ids: jax.checkpoint(attend)(x, ids).sum())),
    "scan": jax.jit(
        lambda x, ids: jax.lax.scan(
            lambda _, y: (None, attend(*y)), None, (x[:, None], ids[:, None])
        )
    ),
}


def run(call: Any, *arguments: Any) -> None:
    jax.block_until_ready(call(*arguments))
    jax.effects_barrier()


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_wrong_traced_ids_raise(transform: str, caplog):
    run(TRANSFORMED[transform], X, jnp.asarray(VALID_IDS))
    expected = r"(?s)query_segment_ids: expected ids of 0 \(padding\) and above, got -1"
    # JAX raises its own error, around the ValueError, where a compiled program calls back.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=expected):
        run(TRANSFORMED[transform], X, jnp.asarray(WRONG_IDS))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"query_seq_lengths": [4, 5]}, "query_seq_lengths: expected lengths from 0 to 4, got 5"),
        ({"key_value_seq_lengths": [-1, 4]}, "expected lengths from 0 to 4, got -1"),
        ({"local_window_size": -2}, "local_window_size: expected a non-negative int .*, got -2"),
        ({"query_segment_ids": [[1, 2, 1, 2]] * 2}, "got 1 after 2"),
        ({"query_segment_ids": [[1, 1, 1, 2]] * 2}, "max_segment_len=2, got one of 3"),
    ],
)
def test_wrong_traced_values_raise(arguments: dict[str, Any], expected: str):
    static: dict[str, Any] = (
        {"max_segments": 2, "max_segment_len": 2} if "query_segment_ids" in arguments else {}
    )
    call = jax.jit(lambda arrays: dot_product_attention(X, X, X, **arrays, **static))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)ValueError: .*{expected}"):
        run(call, {x: jnp.asarray(y) for x, y in arguments.items()})


def test_wrong_traced_cu_seqlens_raise():
    call = jax.jit(lambda cu: ragged_dot_product_attention(
        X[0], X[0], X[0], cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=2, max_seqlen_kv=2,
    ))  # fmt: skip
    run(call, jnp.array([0, 2, 4]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="max_seqlen_q=2, got one of 3"):
        run(call, jnp.array([0, 3, 4]))


def test_ids_from_0_warn_when_the_program_runs():
    call = jax.jit(lambda ids: attend(X, ids))
    with pytest.warns(AttentionConventionWarning, match="add 1 to them"):
        run(call, jnp.array([[0, 0, 1, 1]] * 2))


def test_changing_the_setting_retraces_a_jitted_call():
    call = jax.jit(lambda ids: attend(X, ids))
    with settings.restored(replace(settings.current(), check=False)):
        assert np.isnan(call(jnp.asarray(WRONG_IDS))).any()
    with pytest.raises(jax.errors.JaxRuntimeError, match="got -1"):
        run(call, jnp.asarray(WRONG_IDS))
    with settings.restored(replace(settings.current(), check=False)):
        run(call, jnp.asarray(WRONG_IDS))


def test_no_callback_where_no_value_can_be_wrong():
    assert "callback" not in str(jax.make_jaxpr(lambda x: dot_product_attention(x, x, x))(X))
    known = jax.make_jaxpr(lambda x: attend(x, VALID_IDS))(X)
    assert "callback" not in str(known)
    assert "debug_callback" in str(jax.make_jaxpr(attend)(X, VALID_IDS))
    assert explain(X, X, X, query_segment_ids=jax.ShapeDtypeStruct((2, 4), "int32")).chosen_forward
