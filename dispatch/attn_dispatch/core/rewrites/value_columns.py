"""Value dims that exceed the engine's limit: several calls, each for some columns of value.

All calls have the same scores. Forward, each computes the columns of the output that belong to its
columns of value. Backward, given lse, every gradient is linear in these columns: delta and dp are
sums over columns, so all gradients except value's are sums over the calls. The gradient of lse
needs further columns (semantics/lse_grad.py), and is passed to the first call.
"""

from __future__ import annotations

import jax.numpy as jnp

from attn_dispatch.call.operands import Section, fitted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Calls, NamedArrays, Rewrite, changed, for_
from attn_dispatch.semantics.wider_arrays import round_up

_MULTIPLE = 8
"""Head dims are multiples of this. The gradient of lse needs at most this many columns."""


def _value_columns(most: int, *, needed_for: str) -> Rewrite:
    """The rewrite into calls with at most `most` columns of value each."""

    return Rewrite(
        f"value: a call for at most {most} columns each, one after the other",
        lambda spec: changed(spec, sizes={"v": _columns(spec, most)}),
        _compute,
        when=lambda spec: _columns(spec, most) < spec.head_dim_v,
        needed_for=needed_for,
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    size, parts = inner.head_dim_v, list[NamedArrays]()
    for first in range(0, spec.head_dim_v, size):
        columns = Section({"v": (first, min(first + size, spec.head_dim_v))})
        given = {x: fitted(x, columns.cut(x, y), inner.sizes) for x, y in operands.items()}
        parts.append(calls.kernel(for_(inner, given)))
        if spec.has("lse_grad"):
            operands = operands | {"lse_grad": jnp.zeros_like(operands["lse_grad"])}
    results = dict(parts[0])
    if not spec.is_backward:
        out = jnp.concatenate([part["out"] for part in parts], axis=3)
        return results | {"out": out[..., : spec.head_dim_v]}
    for name, x in results.items():
        every = [part[name] for part in parts]
        if name == "value":
            results[name] = jnp.concatenate(every, axis=3)[..., : spec.head_dim_v]
        else:
            total = sum(y.astype(jnp.float32) for y in every)
            results[name] = jnp.asarray(total).astype(x.dtype)
    return results


def _columns(spec: AttentionSpec, most: int) -> int:
    """The number of columns in each call, for the smallest number of calls."""
    most -= _MULTIPLE if spec.has("lse_grad") else 0
    calls = max(-(-spec.head_dim_v // most), 1)
    return round_up(-(-spec.head_dim_v // calls), _MULTIPLE)


VALUES_OF_256 = _value_columns(256, needed_for="rewrites/differential_lse_grad")
VALUES_OF_128 = _value_columns(128, needed_for="rewrites/differential")
