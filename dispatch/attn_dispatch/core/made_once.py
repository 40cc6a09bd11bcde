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
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var

from attn_dispatch.core import jax_compat
from attn_dispatch.core.jax_compat import Context, MlirValues, batching, mlir
from attn_dispatch.typed_jax import bind, evaluated

Maker = Callable[..., Sequence[jax.Array]]
"""A hashable function of arrays. Two that are equal make the same arrays."""


def made_once(maker: Maker, *arrays: jax.Array) -> list[jax.Array]:
    """The integer arrays that `maker` makes, kept by JAX for the backward pass."""
    fixed = [jax.lax.stop_gradient(x) for x in arrays]
    return bind(made_once_p, *fixed, maker=maker)


@dataclass(frozen=True)
class _Mapped:
    """A maker for each slice of arrays along these axes; None for arrays that are not mapped."""

    maker: Maker
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return jax.vmap(self.maker, self.axes)(*arrays)


@lru_cache(maxsize=1024)
def _traced(maker: Maker, types: tuple[ShapedArray, ...]) -> ClosedJaxpr:
    return jax.make_jaxpr(maker)(*types)


def _types(*types: ShapedArray, maker: Maker) -> list[ShapedArray]:
    return [x for x in _traced(maker, types).out_avals if isinstance(x, ShapedArray)]


def _lower(context: Context, *operands: object, maker: Maker) -> MlirValues:
    body = _traced(maker, jax_compat.types_of(context))
    return jax_compat.lower_typed_as(partial(evaluated, body), context, operands)


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
