"""Tracing of a program as the user calls it: some arguments are arrays, others are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, Sharding

from attn_dispatch.core.jax_compat import tracing_for_nvidia
from attn_dispatch.implementation import Device
from attn_dispatch.typed_jax import flattened, type_of
from attn_dispatch.whole_programs.walk import bodies


def traced(
    function: Callable[..., object],
    args: Sequence[object],
    device: Device,
    mesh: Mesh | AbstractMesh | None,
) -> jax.stages.Traced:
    """The program, traced; nothing is computed.

    Args:
      function: the program.
      args: its arguments. Arrays and structs are traced, all else is passed as it is.
      device: the device that it is traced for.
      mesh: the mesh that is set while it is traced; None leaves the one that is set.
    """
    leaves, rebuilt = flattened(tuple(args))
    where = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]

    def program(*arrays: jax.Array) -> list[object]:
        now = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            now[i] = array
        called = tuple(rebuilt(now))
        results, _ = flattened(function(*called))
        # Modules of Flax NNX are updated in place: what they hold now is a result too.
        held, _ = flattened(called)
        given = {id(x) for x in now}
        updated = [x for x in held if id(x) not in given]
        return [x for x in (*results, *updated) if isinstance(x, jax.Array)]

    with _for_device(device), _on_mesh(mesh):
        return jax.jit(program).trace(*(leaves[i] for i in where))


def is_for_several_devices(program: jax.stages.Traced) -> bool:
    """Whether a program has sharded arrays, as far as it says so itself."""
    return _is_sharded(program.jaxpr.jaxpr)


def _is_sharded(jaxpr: Jaxpr) -> bool:
    types = [type_of(x) for x in jaxpr.invars]
    if any(isinstance(x, ShapedArray) and x.sharding.mesh.size > 1 for x in types):
        return True
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            parts = cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
            if any(isinstance(x, Sharding) and x.num_devices > 1 for x in parts):
                return True
        if any(_is_sharded(body.jaxpr) for body in bodies(equation)):
            return True
    return False


def _for_device(device: Device) -> AbstractContextManager[None]:
    """A block in which JAX traces programs that ask for the device as if it were present."""
    arch = re.fullmatch(r"sm(\d+)(\d)", device.arch)
    if arch is None or device.is_present:
        return nullcontext()
    return tracing_for_nvidia((int(arch[1]), int(arch[2])))


def _on_mesh(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[object]:
    if mesh is None:
        return nullcontext()
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
