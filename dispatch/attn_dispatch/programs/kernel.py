"""What a kernel is told of a call's score_mod and mask_mod: nodes, and arrays that they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from attn_dispatch.programs.flat import flat
from attn_dispatch.programs.nodes import (
    GRADIENT,
    SCORE,
    Outside,
    Predicate,
    Register,
    RowKeys,
    S,
    T,
    Unsupported,
    Value,
    Writer,
    lowered,
    may_be_nan,
)
from attn_dispatch.programs.program import INDICES, Program

_TILE = 128
"""What the kernels' tiles are multiples of, or divide."""


@dataclass(frozen=True)
class KernelProgram:
    """score_mod and mask_mod in a kernel's terms."""

    forward: str
    """From the score to what the softmax sees, -inf where a pair may not attend."""
    backward: str
    """From the gradient of that to the gradient of the score; empty where it is the same. It goes
    on where `forward` ended."""
    outside: tuple[Outside | RowKeys, ...]


@dataclass(frozen=True)
class Pairs:
    """The pairs that a kernel computes, and those whose score may be anything."""

    lengths: tuple[int, int]
    """Of queries, those that are cut off among them, and of keys."""
    first_row: int = 0
    """t of the kernel's first row."""
    band: tuple[int | None, int | None] = (None, None)
    """The window around the diagonal that starts at the top left, (left, right)."""
    has_own_lengths: bool = False
    """Whether arrays alone know lengths and diagonal: `lengths` are the most, `band` says no more
    than which sides are open."""
    is_padding_zero: bool = False
    """With lengths of their own: whether query and key are 0 past them."""


@lru_cache(maxsize=1024)
def kernel_program(
    score_mod: Program | None, mask_mod: Program | None, pairs: Pairs, *, is_backward: bool
) -> KernelProgram | str:
    """The nodes, or why a kernel cannot be told."""
    writer = Writer(is_backward=is_backward)
    mod = "score_mod"
    try:
        t = writer.node("i", "add", T, pairs.first_row) if pairs.first_row else T
        # A gradient that reads cuDNN's own tensor of scores reads memory that is not there (H200,
        # 9.28).
        score: Value = writer.node("f", "mul", SCORE, 1.0)
        copied = score
        if score_mod is not None:
            score = _lower(mod, score_mod.body, score_mod, [copied], ["x"], t, writer)
        mod = "mask_mod"
        may: Value = True
        if mask_mod is not None:
            may = _lower(mod, mask_mod.body, mask_mod, [], [], t, writer)
        score = writer.select(may, score, float("-inf"), "f")
        result = writer.result(score)
        forward = writer.needed(result)
        mod = "score_mod"
        if not is_backward or score_mod is None:
            return KernelProgram("; ".join(forward), "", tuple(writer.outside))
        gradient = _gradient(score_mod)
        grad = _lower(mod, gradient, score_mod, [GRADIENT, copied], ["g", "x"], t, writer)
        if grad != GRADIENT:
            grad = writer.select(_where_finite(writer, may, t, pairs), grad, 0.0, "f")
    except Unsupported as error:
        return f"{mod}: {error}"
    if grad == GRADIENT:
        return KernelProgram("; ".join(forward), "", tuple(writer.outside))
    backward = [x for x in writer.needed(writer.result(grad)) if x not in forward]
    return KernelProgram("; ".join(forward), "; ".join(backward), tuple(writer.outside))


def _where_finite(writer: Writer, may_attend: Value, t: Register, pairs: Pairs) -> Value:
    """Where the gradient is what was computed; elsewhere it is 0, and 0 · NaN would be NaN.

    A kernel goes on to the end of its tiles, past the last query and key, and into whatever stands
    behind a sequence (H200, 9.19, 9.28).
    """
    conditions = [
        Predicate("lt", (x, length))
        for x, length in zip((t, S), pairs.lengths, strict=True)
        if length % _TILE
    ]
    left, right = pairs.band
    is_nan_in_band = may_be_nan(writer.lines)
    if pairs.has_own_lengths:
        if is_nan_in_band or not pairs.is_padding_zero:
            conditions.append(Predicate("lt", (S, writer.array(RowKeys("end")))))
        if is_nan_in_band and left is not None:
            conditions.append(Predicate("ge", (S, writer.array(RowKeys("first")))))
    elif is_nan_in_band:
        if left is not None:
            conditions.append(Predicate("ge", (S, writer.arithmetic("i", "add", t, -left))))
        if right is not None:
            conditions.append(Predicate("le", (S, writer.arithmetic("i", "add", t, right))))
    for condition in conditions:
        may_attend = _both(may_attend, condition)
    return may_attend


def _both(x: Any, y: Predicate) -> Predicate:
    return y if x is True else Predicate("and", (x, y))


def _lower(
    mod: str,
    body: ClosedJaxpr,
    program: Program,
    scores: list[Register],
    names: list[str],
    t: Register,
    writer: Writer,
) -> Value:
    """A body of the program, whose inputs begin with these scores."""
    arrays = [f"array {i}" for i in range(len(program.arrays))]
    values: list[Value | None] = [*scores, None, None, t, S, *(None for _ in arrays)]
    return lowered(mod, body, values, writer, [*names, *INDICES, *arrays])


def _gradient(program: Program) -> ClosedJaxpr:
    """Of the gradient of the result, and of the program's inputs, the gradient of the score."""
    function = jaxpr_as_fun(program.jaxpr)

    def gradient(cotangent: Any, score: Any, *others: Any) -> Any:
        def of_score(x: Any) -> Any:
            return jnp.asarray(function(x, *others)[0], score.dtype)

        return jax.vjp(of_score, score)[1](cotangent)[0]

    scores = jax.ShapeDtypeStruct((), jnp.float32)
    others = program.jaxpr.in_avals[1:]
    return flat(jax.make_jaxpr(gradient)(scores, scores, *others))
