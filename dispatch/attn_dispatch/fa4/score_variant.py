"""What a call does to its scores before the softmax, as code that kernels are compiled with.

Kernels are for one such change: a variant. Calls and compiled kernels find each other by a digest
of the code, so a mod may be defined anywhere, and any number of times.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from attn_dispatch.call.operands import mod_operands
from attn_dispatch.programs.array_views import View
from attn_dispatch.programs.inlining import NO_MESH, has_rules, inlined
from attn_dispatch.programs.kernel import score_gradient
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.program import ModProgram, is_finite
from attn_dispatch.programs.scalar_code import ANY, GRADIENT, INDICES, SCORE, Code, Scalar, Span
from attn_dispatch.programs.scalar_lowering import lowered
from attn_dispatch.programs.scalar_operations import select
from attn_dispatch.typed_jax import evaluated

MOST_ARRAYS = 16
"""The most arrays that the code may read (cuda_backend/fa4/calls.h)."""

_VERSION = 1
"""Changes if the same code of a score gets other code of its gradient."""
_STARTS: Span = (0, 2**30)

Arrays = tuple[tuple[str, tuple[int, ...], str], ...]
"""The name of each array as an operand of the call, its shape without copies, and its dtype."""


@dataclass(frozen=True)
class ScoreChange:
    """The changes of a score before the softmax, in this order, but for bias and masks."""

    soft_cap: float | None = None
    score_mod: ModProgram | None = None
    has_slopes: bool = False
    """Whether ALiBi's slopes, one per head, times |t - s| are subtracted."""

    @property
    def is_any(self) -> bool:
        return self != ScoreChange()


@dataclass(frozen=True)
class ScoreVariant:
    """The code of a change (programs/scalar_code.py)."""

    forward: str
    """From the score x to the softmax's input."""
    backward: str
    """From x and the gradient g of the softmax's input to the gradient of x; "" where both
    gradients are the same."""
    arrays: tuple[str, ...]
    """The operands that the code reads as o0, o1, …."""
    types: str
    """A letter for each: f for float32, i for int32."""
    digest: str
    """A name of the change: equal code, or code of equal derivatives, has equal ones."""

    @property
    def indices(self) -> frozenset[str]:
        """Which of b, n, t and s the code reads."""
        words = {*re.findall(r"\w+", f"{self.forward} {self.backward}")}
        return frozenset(x.name for x in INDICES if x.name in words)


@lru_cache(maxsize=256)
def variant_of(change: ScoreChange) -> ScoreVariant:
    """The code of a change.

    Raises:
      Unsupported: there is no code for an operation, of the change or of its derivative.
    """
    program, arrays = _program(change)
    views = [_view(i, *x) for i, x in enumerate(arrays)]
    code = Code()
    forward = code.returning(lowered(program.body, [SCORE, *INDICES, *views], code))
    inside = Code(code.arrays)
    try:
        body = inlined(score_gradient(program))
        gradient = lowered(body, [GRADIENT, SCORE, *INDICES, *views], inside)
    except Unsupported as error:
        raise Unsupported(error.kind, f"its derivative: {error.text}", error.line) from error
    backward = "" if gradient == GRADIENT else inside.returning(_guarded(program, gradient, inside))
    types = "".join("f" if views[i].kind == "f" else "i" for i in code.arrays)
    parts = [str(_VERSION), forward, types]
    mod = change.score_mod
    if mod and has_rules(mod.jaxpr.jaxpr):  # else the forward code determines the derivative
        parts.append(backward)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return ScoreVariant(forward, backward, tuple(arrays[i][0] for i in code.arrays), types, digest)


def _guarded(program: ModProgram, gradient: Scalar, code: Code) -> Scalar:
    """The gradient; 0 in pairs that are masked, where 0 · NaN would be NaN."""
    if is_finite(program):
        return gradient
    is_masked = code.add("p", "eq", GRADIENT, 0.0)
    return select(code, "f", is_masked, 0.0, gradient)


def _program(change: ScoreChange) -> tuple[ModProgram, Arrays]:
    """The whole change as one program."""
    mod = change.score_mod
    read = () if mod is None else mod.arrays
    arrays: Arrays = ()
    if mod is not None:
        names = mod_operands("score_mod", len(read))
        arrays = (
            ("mods_start", (2,), "int32"),
            *((name, *x) for name, x in zip(names, read, strict=True)),
        )
    if change.has_slopes:
        arrays = (*arrays, ("alibi_slopes", (2,), "float32"))

    def changed(
        x: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array, *given: jax.Array
    ) -> jax.Array:
        if change.soft_cap is not None:
            x = cast("jax.Array", _capped(x, change.soft_cap))
        if mod is not None:
            start, of_mod = given[0], given[1 : 1 + len(read)]
            # The call may be one device's part of a larger one.
            (x,) = evaluated(mod.jaxpr, x, b + start[0], n + start[1], t, s, *of_mod)
            x = jnp.asarray(x, jnp.float32)
        if change.has_slopes:
            x = x - given[-1][n] * jnp.abs(t - s)
        return x

    scalars = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    types = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in arrays]
    with use_abstract_mesh(NO_MESH):
        score = jax.ShapeDtypeStruct((), jnp.float32)
        closed = jax.make_jaxpr(changed)(score, *scalars, *types)
        kept, body = inlined(closed, keeps_rules=True), inlined(closed)
    shapes = tuple((shape, dtype) for _, shape, dtype in arrays)
    return ModProgram(str(body.jaxpr), shapes, kept, body), arrays


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _capped(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@_capped.defjvp
def _capped_derivative(
    cap: float, given: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The derivative in fewer operations than the one that JAX finds."""
    tanh = jnp.tanh(given[0] / cap)
    return cap * tanh, tangents[0] * (1 - tanh * tanh)


def _view(number: int, name: str, shape: Sequence[int], dtype: str) -> View:
    span = _STARTS if name == "mods_start" else ANY
    return View.of(number, shape, _KINDS.get(dtype, dtype), span)


_KINDS = {
    **dict.fromkeys(("float32", "bfloat16", "float16"), "f"),
    **dict.fromkeys(("int32", "int16", "int8", "uint16", "uint8"), "i"),
    "bool": "p",
}
"""The kind in which kernels get an array of a dtype."""
