"""Which mesh axes shard the arrays that the partitioner shows.

These may be parts of mesh axes. If an axis of 8 devices shards 8 rows that are reshaped to [2, 4],
a part of 2 devices shards one dim, and a part of 4 the other. JAX cannot decode that, so it gets a
mesh whose axes are such parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
from jax.sharding import Mesh, Sharding
from jax.sharding import PartitionSpec as P


def mesh_and_specs(
    mesh: Mesh, shardings: Mapping[str, tuple[Sharding, int]], *, in_parts: bool = False
) -> tuple[Mesh, dict[str, P]]:
    """The mesh and, by name, the spec of each array on it; the given mesh, if its axes suffice.

    Args:
      mesh: the mesh of the program.
      shardings: the sharding and the number of dims of each array, by name.
      in_parts: whether the axes are parts even if the given ones suffice.
    """
    if mesh.empty:  # a program for one device, whatever mesh is set around it
        return mesh, {x: P() for x in shardings}
    candidate, found = mesh, dict[str, P | None]()
    for candidate in (*(() if in_parts else (mesh,)), *_in_parts(mesh)):
        found = {x: _spec(sharding, ndim, candidate) for x, (sharding, ndim) in shardings.items()}
        if all(spec is not None for spec in found.values()):
            break
    # An array that no axes describe is passed whole.
    return candidate, {x: P() if spec is None else spec for x, spec in found.items()}


def spec_on(mesh: Mesh, sharding: Sharding, ndim: int) -> P:
    """The spec of an array on this mesh; that of a whole array if no axes describe its sharding."""
    found = None if mesh.empty else _spec(sharding, ndim, mesh)
    return P() if found is None else found


def parts_of(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The parts of prime size of each axis, by name, each with its size."""
    return {name: _parts(name, _primes(size)) for name, size in sizes.items()}


def name_of(axis: str) -> str:
    """The mesh axis that contains this axis: itself, or the one that it is a part of."""
    return axis.split(_PART)[0]


_PART = ", part "


def _in_parts(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with axes of prime sizes, for every order of the primes of an axis."""
    for orders in itertools.product(*(_orders(_primes(size)) for size in mesh.shape.values())):
        sizes = dict[str, int]()
        for name, primes in zip(mesh.axis_names, orders, strict=True):
            sizes |= _parts(name, primes)
        yield Mesh(mesh.devices.reshape(*sizes.values()), tuple(sizes))


def _parts(name: str, primes: list[int]) -> dict[str, int]:
    return {f"{name}{_PART}{i}": prime for i, prime in enumerate(primes)}


def _orders(numbers: list[int]) -> list[list[int]]:
    """The distinct orders of these numbers, the order given first if it ascends."""
    if not numbers:
        return [[]]
    orders: list[list[int]] = []
    for first in dict.fromkeys(numbers):
        others = list(numbers)
        others.remove(first)
        orders += [[first, *rest] for rest in _orders(others)]
    return orders


def _primes(size: int) -> list[int]:
    primes: list[int] = []
    factor = 2
    while size > 1:
        while size % factor == 0:
            primes.append(factor)
            size //= factor
        factor += 1
    return primes


def _spec(sharding: Sharding, ndim: int, mesh: Mesh) -> P | None:
    """The axes of this mesh that shard each dim; None if no axes describe the sharding."""
    # Dims as long as the number of devices: every possible number of shards divides that.
    length = mesh.devices.size
    indices = cast(
        "Mapping[object, tuple[slice, ...]]", sharding.devices_indices_map((length,) * ndim)
    )
    entries: list[tuple[str, ...] | None] = []
    for dim in range(ndim):
        starts = [indices[device][dim].start or 0 for device in mesh.devices.flat]
        axes = _axes(np.reshape(starts, mesh.devices.shape), length)
        if axes is None:
            return None
        entries.append(tuple(mesh.axis_names[axis] for axis in axes) or None)
    return P(*entries)


def _axes(starts: np.ndarray, length: int) -> tuple[int, ...] | None:
    """The axes that shard a dim, major ones first, given where it starts on each device."""
    origin = starts.flat[0]
    along = [
        int(starts[tuple(int(i == axis) for i in range(starts.ndim))] - origin) if size > 1 else 0
        for axis, size in enumerate(starts.shape)
    ]
    axes = sorted((axis for axis, step in enumerate(along) if step), key=lambda x: -along[x])
    parts = math.prod(starts.shape[axis] for axis in axes)
    expected = np.zeros_like(starts)
    step = length
    for axis in axes:
        step //= starts.shape[axis]
        place = cast("np.ndarray", np.arange(starts.shape[axis]) * step)
        expected = expected + place.reshape([-1 if i == axis else 1 for i in range(starts.ndim)])
    is_exact = length % parts == 0 and origin == 0 and np.array_equal(starts, expected)
    return tuple(axes) if is_exact else None
