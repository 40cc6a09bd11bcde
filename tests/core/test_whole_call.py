"""A call that is all that its program computes, found while it is lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import dot_product_attention, settings
from attn_dispatch.core import select

Q = jnp.ones((1, 16, 2, 8), jnp.float32)
W = jnp.ones((8, 8), jnp.float32)


def attend(q: jax.Array) -> jax.Array:
    return dot_product_attention(q, q, q)


def model(q: jax.Array) -> jax.Array:
    return attend(q @ W) @ W


def in_a_scan(q: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (attend(x), None), q, None, length=2)[0]


def gradient(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda q: function(q).sum())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (attend, [True]),
        (gradient(attend), [True, True]),
        (lambda q: attend(q.reshape(2, 8, 2, 8)), [True]),
        (model, [False]),
        (gradient(model), [False, False]),
        (in_a_scan, [False]),
        (lambda q: jax.jit(attend)(q), [False]),
    ],
)
def test_a_call_whose_arrays_are_the_programs_arguments_is_the_whole_program(
    program: Any, expected: list[bool], monkeypatch: pytest.MonkeyPatch
):
    seen: list[bool] = []
    choose = select.choose

    def noted(*args: Any) -> Any:
        seen.append(settings.current().is_alone)
        return choose(*args)

    monkeypatch.setattr(select, "choose", noted)
    jax.jit(program).lower(Q)
    assert seen == expected
