"""Wrong layouts."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.features import returns_lse
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import first_everywhere, misread


@wrong(lambda c: c.b == 4 and c.transform == "vmap", "forward")
def mapped_rows_mixed(call):
    """The axis that vmap maps and the batch axis are split in the wrong order."""
    results, b = call.right(), call.spec.batch
    order = jnp.arange(b).reshape(2, b // 2).T.reshape(-1) if b % 2 == 0 else jnp.arange(b)
    return results | {"out": results["out"][order]}


@wrong(lambda c: c.b > 1)
def keys_of_the_first_batch_row(call):
    """All batch rows have the keys of the first."""
    return call.right({"key": first_everywhere(call["key"])})


@wrong(lambda c: c.t > 1 and c.n > 1, "forward")
def out_with_heads_first(call):
    """The output lies in memory as [B, N, T, V]."""
    results = call.right()
    return results | {"out": results["out"].swapaxes(1, 2)}


@wrong(lambda c: returns_lse(c) and c.t > 1 and c.n > 1, "forward")
def lse_with_heads_last(call):
    """lse lies in memory as [B, T, N]."""
    results = call.right()
    return results | {name: x.swapaxes(1, 2) for name, x in results.items() if name == "lse"}


@wrong(lambda c: c.lse_grad and c.t > 1 and c.n > 1, "backward")
def lse_gradient_with_heads_last(call):
    """The gradient of lse is read as if it lay in memory as [B, T, N]."""
    if "lse_grad" not in call:
        return call.right()
    return call.right({"lse_grad": misread(call["lse_grad"])})


@wrong(lambda c: c.v > c.h, "forward")
def wide_values_cut(call):
    """The output has only as many columns as query; its further columns are 0."""
    results = call.right()
    return results | {"out": results["out"].at[..., call.spec.head_dim :].set(0)}


@wrong(lambda c: c.v < c.h, "backward")
def narrow_values_gradient_shifted(call):
    """The columns of value's gradient are shifted by one where value is narrower than query."""
    results = call.right()
    shifted = {name: jnp.roll(x, 1, axis=-1) for name, x in results.items() if name == "value"}
    return results | shifted
