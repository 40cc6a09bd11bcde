"""Arrays that are made once for all layers, although every layer's call asks for them.

A mask does not change from layer to layer, and its intervals and lists of tiles do not either. But
a program that scans over layers asks for them inside its loop, and XLA does not move them out of a
loop for GPUs. JAX does so for what the backward pass needs and the loop does not change. Under
`jax.checkpoint` it would compute them again even so, in each layer's backward pass.

So such arrays are the results of a primitive. To JAX they are always worth keeping for the backward
pass, whatever the policy of `jax.checkpoint`. They are small, and one copy serves all layers. They
are integers without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.sharding import use_abstract_mesh
from jax.stages import Traced, Wrapped

from attn_dispatch.core import jax_compat
from attn_dispatch.core.jax_compat import Context, MlirValues, batching, mlir
from attn_dispatch.programs.inlining import NO_MESH
from attn_dispatch.typed_jax import bind

Maker = Callable[..., Sequence[jax.Array]]
"""A hashable function of arrays. Two that are equal make the same arrays."""


class KeptMaker:
    """Base class of makers that many masks share.

    The first lowering is kept as a module: to lower hundreds of operations takes JAX ten times as
    long as to read them.
    """


class ConstantMaker:
    """Base class of makers that read no arrays: what they make is constants of the program."""

    def constants(self) -> Sequence[np.ndarray]:
        """The arrays."""
        raise NotImplementedError

    def __call__(self) -> Sequence[jax.Array]:
        return [jnp.asarray(x) for x in self.constants()]


def made_once(maker: Maker, *arrays: jax.Array | np.generic) -> list[jax.Array]:
    """The integer arrays that `maker` makes, kept by JAX for the backward pass."""
    are_floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    fixed = [jax.lax.stop_gradient(x) if y else x for x, y in zip(arrays, are_floats, strict=True)]
    return bind(made_once_p, *fixed, maker=maker)


@dataclass(frozen=True)
class _Mapped:
    """A maker for each slice of arrays along these axes; None for arrays that are not mapped."""

    maker: Maker
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return jax.vmap(self.maker, self.axes)(*arrays)


@lru_cache(maxsize=1024)
def _compiled(maker: Maker) -> Wrapped:
    def made(*arrays: jax.Array) -> Sequence[jax.Array]:
        return maker(*arrays)

    made.__name__ = type(maker).__name__  # its name in programs
    return jax.jit(made, keep_unused=True)


@lru_cache(maxsize=1024)
def _traced(maker: Maker, types: tuple[ShapedArray, ...]) -> Traced:
    return _compiled(maker).trace(*types)


def _plain(types: Sequence[ShapedArray]) -> tuple[ShapedArray, ...]:
    return tuple(ShapedArray(x.shape, x.dtype) for x in types)


def _types(*types: ShapedArray, maker: Maker) -> list[ShapedArray]:
    if isinstance(maker, ConstantMaker):
        return [ShapedArray(x.shape, x.dtype) for x in maker.constants()]
    # The lowering asks for plain types without a mesh, and finds what is traced here.
    with use_abstract_mesh(NO_MESH) if types == _plain(types) else nullcontext():
        return [x for x in _traced(maker, types).jaxpr.out_avals if isinstance(x, ShapedArray)]


def _lower(context: Context, *operands: object, maker: Maker) -> MlirValues:
    if isinstance(maker, ConstantMaker):
        return jax_compat.constants(maker.constants())
    types = _plain(jax_compat.types_of(context))
    platforms = jax_compat.platforms_of(context)
    # A module is for one platform; with several, an exported program finds its own when it runs.
    if isinstance(maker, KeptMaker) and len(platforms) == 1:
        module = _module(maker, types, platforms[0])
        return jax_compat.call_module(module, type(maker).__name__, context, operands)

    def made(*arrays: jax.Array) -> object:
        with use_abstract_mesh(NO_MESH):
            return cast("object", _compiled(maker)(*arrays))

    return jax_compat.lower_as(made, context, operands)


@lru_cache(maxsize=1024)
def _module(maker: Maker, types: tuple[ShapedArray, ...], platform: str) -> bytes:
    with use_abstract_mesh(NO_MESH):
        return jax_compat.module_of(_traced(maker, types), platform)


def _batch(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], *, maker: Maker
) -> tuple[list[jax.Array], list[int]]:
    made = bind(made_once_p, *arrays, maker=_Mapped(maker, tuple(axes)))
    return made, [0] * len(made)


def _split(
    policy: object, unknown: Sequence[bool], is_instantiated: Sequence[bool], equation: JaxprEqn
) -> tuple[JaxprEqn | None, JaxprEqn | None, list[bool], list[bool], list[Var]]:
    """JAX's division of a program into what it computes now and what it stages: all is computed
    now, and kept, if the arrays are known.

    The last result has the arrays that the staged equation needs kept.
    """
    count = len(equation.outvars)
    if not any(unknown):
        return equation, None, [False] * count, [False] * count, []
    kept = [
        x
        for x, has in zip(equation.invars, is_instantiated, strict=True)
        if isinstance(x, Var) and not has
    ]
    return None, equation, [True] * count, [True] * count, kept


def _make_primitive() -> Primitive:
    primitive = Primitive("attn_made_once")
    primitive.multiple_results = True
    jax_compat.run_eagerly(primitive)
    primitive.def_abstract_eval(_types)
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, _lower)
    jax_compat.partial_eval_rules[primitive] = _split
    return primitive


made_once_p = _make_primitive()
