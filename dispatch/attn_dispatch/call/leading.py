"""Making one of an array's leading dims, where Explicit mesh axes may shard more than the first.

JAX has no such reshape: the rows that a device holds do not follow one another. Every device makes
one of the dims of its own part, so that nothing moves, and rows are in another order until they are
taken apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Entry = tuple[str, ...]


@dataclass(frozen=True)
class Leading:
    """The dims that become one, and what shards them."""

    shape: tuple[int, ...]
    axes: tuple[Entry, ...]
    """Of each dim the Explicit mesh axes."""
    mesh: Any

    @staticmethod
    def of(shape: tuple[int, ...], arrays: Iterable[jax.Array]) -> Leading:
        """The leading dims `shape` of these arrays, sharded as the first array that is sharded."""
        for x in arrays:
            sharding = jax.typeof(x).sharding
            axes = tuple(map(_entry, sharding.spec[: len(shape)]))
            if any(axes):
                return Leading(shape, axes, sharding.mesh)
        return Leading(shape, ((),) * len(shape), None)

    @property
    def keeps_order(self) -> bool:
        """Whether the rows are in the order of the dims."""
        return not any(self.axes[1:])

    def merged(self, x: jax.Array) -> jax.Array:
        """[*shape, ...] to [rows, ...]."""
        rest = x.shape[len(self.shape) :]
        if self.keeps_order:
            return x.reshape(math.prod(self.shape), *rest)
        inner = jax.typeof(x).sharding.spec[len(self.shape) :]
        x = jax.sharding.reshard(x, NamedSharding(self.mesh, P(*self._specs, *inner)))
        here = math.prod(self._shape_here)
        return self._on_each(
            lambda x: x.reshape(here, *x.shape[len(self.shape) :]),
            P(*self._specs, *inner), P(self._all, *inner), x,
        )  # fmt: skip

    def split(self, x: jax.Array) -> jax.Array:
        """[rows, ...] to [*shape, ...]."""
        if self.keeps_order:
            return x.reshape(*self.shape, *x.shape[1:])
        inner = jax.typeof(x).sharding.spec[1:]
        x = jax.sharding.reshard(x, NamedSharding(self.mesh, P(self._all, *inner)))
        return self._on_each(
            lambda x: x.reshape(*self._shape_here, *x.shape[1:]),
            P(self._all, *inner), P(*self._specs, *inner), x,
        )  # fmt: skip

    def row_of_each(self) -> jax.Array:
        """[rows] int32: which row, in the order of the dims, stands where."""
        rows = math.prod(self.shape)
        return self.merged(jnp.arange(rows, dtype=jnp.int32).reshape(self.shape))

    @property
    def _all(self) -> Entry:
        return tuple(axis for axes in self.axes for axis in axes)

    @property
    def _specs(self) -> tuple[Entry | None, ...]:
        return tuple(axes or None for axes in self.axes)

    @property
    def _shape_here(self) -> tuple[int, ...]:
        ways = (math.prod(self.mesh.shape[axis] for axis in axes) for axes in self.axes)
        return tuple(size // n for size, n in zip(self.shape, ways, strict=True))

    def _on_each(
        self, function: Callable[[jax.Array], jax.Array], source: P, to: P, x: jax.Array
    ) -> jax.Array:
        """The function on what each device holds."""
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
        return jax.shard_map(
            function, mesh=self.mesh, axis_names=explicit, in_specs=source, out_specs=to
        )(x)


def with_one_leading_dim(given: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Leading]:
    """The arguments of a call, their leading dims made one where a plain reshape would not do.

    What does not have query's leading dims stays as it is, to be found wrong, or to be broadcast.
    """
    query = given["query"]
    dims = query.shape[:-3]
    rows = Leading.of(dims, (given[name] for name in ("query", "key", "value")))
    if rows.keeps_order:
        return given, rows

    def merged(name: str, x: jax.Array) -> jax.Array:
        if name in ("bias", "mask") and x.ndim == query.ndim:
            if set(x.shape[: len(dims)]) == {1}:
                return x.reshape(1, *x.shape[len(dims) :])
            x = jnp.broadcast_to(x, (*dims, *x.shape[len(dims) :]))
        return rows.merged(x) if x.shape[: len(dims)] == dims else x

    return {name: merged(name, x) for name, x in given.items()}, rows


def _entry(axes: Any) -> Entry:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
