"""The library's mods on cuDNN, with gradients of the arrays they read, compared with XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, mods

B, T, S, N, K, H = 2, 300, 460, 4, 2, 64
_TABLE = jnp.sin(jnp.arange(32.0 * N)).reshape(32, N)
_SLOPES = jnp.linspace(0.01, 0.5, N)
_LENGTHS = jnp.array([130, 460])
_CAUSAL: dict[str, Any] = {"is_causal": True}

Options = Callable[[jax.Array], dict[str, Any]]


def t5(table: jax.Array) -> dict[str, Any]:
    return {"score_mod": mods.relative_position(table)}


CALLS: dict[str, tuple[str, Options, jax.Array]] = {
    "soft cap": ("", lambda cap: {"score_mod": mods.soft_cap(2.0), **_CAUSAL}, _SLOPES),
    "soft cap and slopes": (
        "",
        lambda x: {"score_mod": lambda score, b, n, t, s: 3 * jnp.tanh(score / 3) - x[n] * (t - s)},
        _SLOPES,
    ),
    "ALiBi": ("as alibi_slopes", lambda x: {"score_mod": mods.alibi(x), **_CAUSAL}, _SLOPES),
    "ALiBi both ways": ("as alibi_slopes", lambda x: {"score_mod": mods.alibi(x)}, _SLOPES),
    "T5": ("as a bias", t5, _TABLE),
    "T5 in 16 bits": ("as a bias", t5, _TABLE.astype(jnp.bfloat16)),
    "T5, causal": ("as a bias", lambda x: t5(x) | _CAUSAL, _TABLE),
    "lengths": ("as lengths", lambda _: {"mask_mod": lambda b, n, t, s: s < _LENGTHS[b]}, _TABLE),
    "lengths in a window": (
        "as lengths",
        lambda _: {"mask_mod": lambda b, n, t, s: (s < _LENGTHS[b]) & (t - s < 70) & (s <= t)},
        _TABLE,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_of_mods_agree_with_xla(name: str):
    how, options, array = CALLS[name]
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, out_grad = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    found = explain(q, k, v, **options(array))
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", "cudnn")
    assert how in str(found)

    def results(*arrays: jax.Array, implementation: str | None = None) -> list[np.ndarray]:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, array: jax.Array) -> jax.Array:
            return dot_product_attention(q, k, v, implementation=implementation, **options(array))

        def both(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(call, *arrays)
            return out, *pull(out_grad.astype(out.dtype))

        return [np.asarray(x, np.float64) for x in jax.jit(both)(*arrays)]

    got = results(q, k, v, array)
    wide = (x.astype(jnp.float32) for x in (q, k, v, array))
    with jax.default_matmul_precision("highest"):
        exact = results(*wide, implementation="xla")
    for x, y in zip(got, exact, strict=True):
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max() + 1e-6
