"""vmap of an attention call: the mapped axis becomes one more leading dim of every operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.leading import SHAREABLE
from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.typed_jax import mapped

Dims = Sequence[int | None]
Bound = Callable[..., list[jax.Array]]


def batch_call(
    bind: Bound, operands: Sequence[jax.Array], dims: Dims, options: AttentionOptions
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of a call: its results, mapped along their first axis.

    Args:
      bind: the function of operands that computes the call with these options.
      operands: the arrays, in the order of options.operands, and those that follow them
        (mask_arrays.py).
      dims: the mapped axis of each; None for an operand that is not mapped.
      options: the call's options.
    """
    wanted, partner = options.wanted.gradients, options.wanted.partner
    if partner is not None and wanted:
        num_forward = len(partner.operands)
        if all(dim is None for dim in dims[:num_forward]):
            # The forward call is not mapped. If its shape changed, another implementation might
            # compute it, with another dropout mask.
            return _map_calls(bind, operands, dims)
    # With dropout, both passes need the same shapes, so that the same code computes them.
    if partner is not None:
        wanted = wanted or partner.wanted.gradients
    front = _Front.of(operands, dims)

    count = len(options.operands)
    first = front.of_operands(options.operands, operands[:count], dims[:count], wanted)
    results = bind(*first, *map(_shared, operands[count:], dims[count:]))
    return results, [0] * len(results)


def batch_tangents(
    bind: Bound,
    arrays: Sequence[jax.Array],
    dims: Dims,
    options: AttentionOptions,
    wanted: tuple[str, ...],
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of attn_jvp where each mapped call is a part of one call's batch.

    Args:
      bind: the function of the arrays that computes the tangents.
      arrays: operands, out, lse, those that follow the operands (mask_arrays.py), and tangents.
      dims: the mapped axis of each; None for an array that is not mapped.
      options: the call's options.
      wanted: the operands that have tangents.
    """
    front, count = _Front.of(arrays, dims), len(options.operands)
    last = len(arrays) - len(wanted)
    operands = front.of_operands(options.operands, arrays[:count], dims[:count], wanted)
    out_and_lse = map(front.moved, arrays[count : count + 2], dims[count : count + 2])
    further = map(_shared, arrays[count + 2 : last], dims[count + 2 : last])
    tangents = map(front.moved, arrays[last:], dims[last:])
    results = bind(*operands, *out_and_lse, *further, *tangents)
    return results, [0] * len(results)


def batch_known(
    bind: Bound, arrays: Sequence[jax.Array], dims: Dims, options: AttentionOptions, known: int
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of a call whose results are known.

    Args:
      bind: the function of the arrays that returns the results.
      arrays: operands, those that follow them (mask_arrays.py), and results.
      dims: the mapped axis of each; None for an array that is not mapped.
      options: the call's options.
      known: the number of results.
    """
    front, count, last = _Front.of(arrays, dims), len(options.operands), len(arrays) - known
    partner = options.wanted.partner
    wanted = () if partner is None else partner.wanted.gradients
    operands = front.of_operands(options.operands, arrays[:count], dims[:count], wanted)
    further = map(_shared, arrays[count:last], dims[count:last])
    results = bind(*operands, *further, *map(front.moved, arrays[last:], dims[last:]))
    return results, [0] * len(results)


def _shared(x: jax.Array, dim: int | None) -> jax.Array:
    """An array that may be shared along the mapped axis, which comes first."""
    return x[None] if dim is None else jnp.moveaxis(x, dim, 0)


class _Front:
    """The mapped axis, and the Explicit mesh axes that shard it."""

    def __init__(self, size: int, mesh: AbstractMesh | None, axes: str | tuple[str, ...] | None):
        self._size, self._mesh, self._axes = size, mesh, axes

    @staticmethod
    def of(operands: Sequence[jax.Array], dims: Dims) -> _Front:
        mapped = [(x, dim) for x, dim in zip(operands, dims, strict=True) if dim is not None]
        for x, dim in mapped:
            sharding = jax.typeof(x).sharding
            if sharding.spec[dim] is not None:
                return _Front(x.shape[dim], sharding.mesh, sharding.spec[dim])
        x, dim = mapped[0]
        return _Front(x.shape[dim], None, None)

    def of_operands(
        self, names: Sequence[str], arrays: Sequence[jax.Array], dims: Dims, wanted: Sequence[str]
    ) -> list[jax.Array]:
        """The operands with the mapped axis first; those `wanted` have gradients or tangents."""

        def in_front(name: str, x: jax.Array, dim: int | None) -> jax.Array:
            if (name in SHAREABLE or is_mod_operand(name)) and name not in wanted:
                return _shared(x, dim)
            # Not shareable, or each mapped call has a gradient of it.
            return self.moved(x, dim)

        return [*map(in_front, names, arrays, dims)]

    def moved(self, x: jax.Array, dim: int | None) -> jax.Array:
        """The array with the mapped axis first, repeated along it if it is not mapped."""
        return self._repeated(x) if dim is None else jnp.moveaxis(x, dim, 0)

    def _repeated(self, x: jax.Array) -> jax.Array:
        shape = (self._size, *x.shape)
        if self._axes is None or self._mesh is None:
            return jnp.broadcast_to(x[None], shape)
        to = NamedSharding(self._mesh, P(self._axes, *jax.typeof(x).sharding.spec))
        return jnp.broadcast_to(x[None], shape, out_sharding=to)


def _map_calls(
    bind: Bound, operands: Sequence[jax.Array], dims: Dims
) -> tuple[list[jax.Array], list[int]]:
    """One call after the other, each with its slices of the mapped operands."""
    slices_of = {
        i: jnp.moveaxis(operands[i], dim, 0) for i, dim in enumerate(dims) if dim is not None
    }

    def one(slices: dict[int, jax.Array]) -> list[jax.Array]:
        return bind(*(slices.get(i, x) for i, x in enumerate(operands)))

    results = mapped(one, slices_of)
    return results, [0] * len(results)
