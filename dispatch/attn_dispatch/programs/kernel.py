"""Changes of the score as a kernel computes them: nodes, and the arrays that they read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from attn_dispatch.programs import caps_and_slopes
from attn_dispatch.programs.bounded_numbers import Number
from attn_dispatch.programs.caps_and_slopes import Alibi
from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.key_ranges import key_range, xla_array_of
from attn_dispatch.programs.known_forms import is_sum_with_score
from attn_dispatch.programs.lowering import NodeLowering
from attn_dispatch.programs.nodes import (
    GRADIENT,
    SCORE,
    NodeArray,
    Predicate,
    RowKeys,
    S,
    Tensor,
    Unsupported,
    Value,
    Writer,
    may_be_nan,
)
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.reason import Reason
from attn_dispatch.typed_jax import evaluated, vjp

_TILE = 128
"""A multiple or a divisor of every kernel's tile."""
_EXACT_FLOATS = 2**23
"""Whole numbers up to twice this are exact in float32."""


@dataclass(frozen=True)
class ScoreRules:
    """The changes of a score before the softmax, in this order."""

    soft_cap: float | None = None
    score_mod: ModProgram | None = None
    alibi: Alibi | None = None
    mask_mod: ModProgram | None = None

    @property
    def bends(self) -> bool:
        """Whether the gradient of the score changes too, because more is done than adding to it."""
        is_sum = self.score_mod is None or is_sum_with_score(self.score_mod)
        return self.soft_cap is not None or not is_sum

    @property
    def moves(self) -> bool:
        """Whether score_mod, mask_mod or ALiBi is applied."""
        return (self.score_mod, self.alibi, self.mask_mod) != (None, None, None)


@dataclass(frozen=True)
class KernelProgram:
    """`ScoreRules` as nodes of a kernel."""

    forward: str
    """From the score to the softmax's input, -inf where a pair may not attend."""
    backward: str
    """From the gradient of the softmax's input to that of the score, after the forward nodes; empty
    where both are the same."""
    arrays: tuple[NodeArray, ...]
    factor: float = 1.0
    """The factor that scores were multiplied by before `forward` (programs/factor.py)."""


@dataclass(frozen=True)
class Pairs:
    """The pairs that a kernel computes; the scores of other pairs are unspecified."""

    lengths: tuple[int, int]
    """The number of queries, including those cut off at the front, and of keys."""
    first_row: int = 0
    """t of the kernel's first row."""
    band: tuple[int | None, int | None] = (None, None)
    """The window around the top-left diagonal, (left, right)."""
    has_runtime_lengths: bool = False
    """Whether lengths are known at run time only; `lengths` are then upper bounds."""
    has_runtime_diagonal: bool = False
    """Whether the diagonal is known at run time only; of `band` only the open sides count then."""
    is_padding_zero: bool = False
    """With run-time lengths: whether query and key are 0 past them."""


class _Unsupported(Exception):
    """An operation that a kernel has no node for, in this mod or its derivative."""

    def __init__(self, whose: str, operation: Unsupported) -> None:
        super().__init__(whose, operation)
        self.whose, self.operation = whose, operation

    @property
    def reason(self) -> Reason:
        """The reason, whose rule depends on the mod and the limit, not on file and line."""
        operation, line = self.operation, self.operation.line
        where = f" (at {line})" if line else ""
        facts = (("operation", operation.text), ("line", line))
        text = f"{self.whose}: {operation.text}{where}"
        return Reason(f"cudnn/mods/{self.whose}/{operation.kind}", facts, text)


@lru_cache(maxsize=1024)
def kernel_program(rules: ScoreRules, pairs: Pairs, *, is_backward: bool) -> KernelProgram | Reason:
    """The nodes, or why the rules cannot be expressed as nodes."""
    try:
        if is_backward and (with_gradient := _with_gradient(rules, pairs)) is not None:
            return with_gradient
        writer = _writer(pairs, is_backward=is_backward)
        forward = _forward(writer, SCORE, rules, pairs).nodes
        if not _reads_score_once(forward):
            writer = _writer(pairs, is_backward=is_backward)
            forward = _forward(writer, _copied(writer), rules, pairs).nodes
    except _Unsupported as error:
        return error.reason
    return _program(forward, [], writer)


def _writer(pairs: Pairs, *, is_backward: bool) -> Writer:
    right = pairs.band[1]
    is_past = right is not None and right <= 0 and not pairs.has_runtime_diagonal
    return Writer(
        is_backward=is_backward,
        first_row=pairs.first_row,
        is_past=is_past,
        has_exact_floats=max(pairs.lengths) <= _EXACT_FLOATS,
    )


def _copied(writer: Writer) -> Tensor:
    """The score as the result of a node. A second reader of cuDNN's own score tensor may read
    invalid memory (H200, 9.28)."""
    return writer.node("f", "mul", SCORE, 1.0)


def _reads_score_once(nodes: list[str]) -> bool:
    """Whether exactly one node reads cuDNN's own scores, and not to select."""
    reading = [node.split()[2] for node in nodes for word in node.split()[3:] if word == SCORE.name]
    return len(reading) == 1 and reading != ["select"]


@dataclass(frozen=True)
class _Forward:
    """The nodes from the score to the softmax's input, and those that a backward pass reads."""

    nodes: list[str]
    tanh: Tensor | None
    """The tanh of a soft cap."""
    capped: Tensor
    """The input of a score_mod."""
    may_attend: Value
    """The mask of mask_mod."""


def _forward(writer: Writer, score: Tensor, rules: ScoreRules, pairs: Pairs) -> _Forward:
    tanh, capped = None, score
    if rules.soft_cap is not None:
        capped, tanh = caps_and_slopes.soft_cap(writer, score, rules.soft_cap)
    made: Value = capped
    if (score_mod := rules.score_mod) is not None:
        made = _lower("score_mod", score_mod.body, score_mod, [capped], ["x"], writer)
    if rules.alibi is not None:
        made = caps_and_slopes.alibi(writer, made, rules.alibi)
    may = True if rules.mask_mod is None else _may_attend(writer, rules.mask_mod, pairs)
    made = writer.select(may, made, float("-inf"), "f")
    return _Forward(writer.needed(writer.result(made)), tanh, capped, may)


def _with_gradient(rules: ScoreRules, pairs: Pairs) -> KernelProgram | None:
    """The nodes of both passes; None where the gradient of the score is that of the result."""
    if not rules.bends:
        return None
    writer, score_mod = _writer(pairs, is_backward=True), rules.score_mod
    forward = _forward(writer, SCORE if score_mod is None else _copied(writer), rules, pairs)
    grad: Value = GRADIENT
    if score_mod is not None:
        inputs, names = [GRADIENT, forward.capped], ["g", "x"]
        try:
            grad = _lower("score_mod", score_gradient(score_mod), score_mod, inputs, names, writer)
        except _Unsupported as error:
            raise _Unsupported(f"{error.whose}'s derivative", error.operation) from error
    if forward.tanh is not None:
        grad = caps_and_slopes.soft_cap_gradient(writer, grad, forward.tanh)
    if grad == GRADIENT:
        return None
    if score_mod is not None:
        grad = writer.select(_where_finite(writer, forward.may_attend, pairs), grad, 0.0, "f")
    backward = [x for x in writer.needed(writer.result(grad)) if x not in forward.nodes]
    return _program(forward.nodes, backward, writer)


def _program(forward: list[str], backward: list[str], writer: Writer) -> KernelProgram:
    """The nodes and the arrays that they read; arrays that no node reads are left out."""
    read = {word for node in (*forward, *backward) for word in node.split()}
    kept = [i for i in range(len(writer.arrays)) if f"o{i}" in read]
    names = {f"o{i}": f"o{kept.index(i)}" for i in kept}

    def text(nodes: list[str]) -> str:
        return "; ".join(" ".join(names.get(x, x) for x in node.split()) for node in nodes)

    return KernelProgram(text(forward), text(backward), tuple(writer.arrays[i] for i in kept))


def _may_attend(writer: Writer, mask_mod: ModProgram, pairs: Pairs) -> Value:
    """The conditions of a mask_mod that the band does not already impose."""
    keys = key_range(mask_mod)
    left, right = (None, None) if pairs.has_runtime_diagonal else pairs.band
    may: Value = True
    for one in keys.rest:
        may = _both(_lower("mask_mod", one, mask_mod, [], [], writer), may)
    first, end = keys.first, keys.end
    # One comparison for each side: selecting by one and then by another takes four times as long
    # (H200, 9.19).
    if first is not None and not (left is not None and _is_at_most(first.offset, -left)):
        which = "first" if pairs.has_runtime_lengths and left is not None else None
        may = _both(Predicate("ge", (S, _border(writer, first, mask_mod, which))), may)
    if end is not None and not (right is not None and _is_at_most(right + 1, end.offset)):
        which = "end" if pairs.has_runtime_lengths else None
        may = _both(Predicate("lt", (S, _border(writer, end, mask_mod, which))), may)
    return may


def _is_at_most(x: int | None, y: int | None) -> bool:
    return x is not None and y is not None and x <= y


def _border(writer: Writer, number: Number, mask_mod: ModProgram, which: str | None) -> Value:
    """A bound of each query's range of keys, as a value in the kernel.

    Args:
      which: "first" or "end" if a backward pass also needs the `RowKeys` of that side. One array
        then serves both, because a kernel has room for few arrays by row (cudnn/rules.py).
    """
    least, most = number.span
    if number.offset is not None:
        return writer.arithmetic("i", "add", writer.t, number.offset)
    if not number.of_t and least == most:
        return int(least)
    border = xla_array_of(number, mask_mod)
    return writer.array(RowKeys(which, border) if which and writer.is_backward else border)


def _where_finite(writer: Writer, may_attend: Value, pairs: Pairs) -> Value:
    """The pairs whose computed gradient counts. For others 0 is selected: 0 · NaN would be NaN.

    A kernel computes whole tiles, past the last query and key, on whatever is stored behind a
    sequence (H200, 9.19, 9.28).
    """
    queries, _ = pairs.lengths
    conditions: list[Predicate] = []
    if (queries - pairs.first_row) % _TILE:
        conditions.append(Predicate("lt", (writer.t, queries)))
    is_nan_in_band = may_be_nan(writer.lines)
    known = {x.which for x in writer.arrays if isinstance(x, RowKeys)}
    conditions += _inside_keys(writer, pairs, known, is_nan_in_band=is_nan_in_band)
    if is_nan_in_band:
        conditions += _inside_band(writer, pairs, known)
    for condition in conditions:
        may_attend = _both(may_attend, condition)
    return may_attend


def _inside_keys(
    writer: Writer, pairs: Pairs, known: Collection[str | None], *, is_nan_in_band: bool
) -> list[Predicate]:
    """The condition that a key is not past the last one, unless mods impose it already."""
    _, keys = pairs.lengths
    if pairs.has_runtime_lengths and (is_nan_in_band or not pairs.is_padding_zero):
        if "end" in known:
            return []
        return [Predicate("lt", (S, writer.array(RowKeys("end"))))]
    return [Predicate("lt", (S, keys))] if keys % _TILE else []


def _inside_band(writer: Writer, pairs: Pairs, known: Collection[str | None]) -> list[Predicate]:
    """The conditions of the band that the mods and `_inside_keys` do not impose already."""
    left, right = pairs.band
    if pairs.has_runtime_lengths:
        if left is None or "first" in known:
            return []
        return [Predicate("ge", (S, writer.array(RowKeys("first"))))]
    conditions: list[Predicate] = []
    if left is not None:
        conditions.append(Predicate("ge", (S, writer.arithmetic("i", "add", writer.t, -left))))
    if right is not None:
        conditions.append(Predicate("le", (S, writer.arithmetic("i", "add", writer.t, right))))
    return conditions


def _both(x: Value, y: Value) -> Value:
    if isinstance(x, bool) or isinstance(y, bool):
        return (y if x else False) if isinstance(x, bool) else (x if y else False)
    return Predicate("and", (x, y))


def _lower(
    mod: str,
    body: ClosedJaxpr,
    program: ModProgram,
    scores: list[Tensor],
    names: list[str],
    writer: Writer,
) -> Value:
    """The value of a body of the program, whose first inputs are `scores`."""
    arrays = [f"array {i}" for i in range(len(program.arrays))]
    values: list[Value | None] = [*scores, None, None, writer.t, S, *(None for _ in arrays)]
    try:
        return NodeLowering(mod, body, values, writer, [*names, *INDICES, *arrays]).result()
    except Unsupported as error:
        raise _Unsupported(mod, error) from error


def score_gradient(program: ModProgram) -> ClosedJaxpr:
    """The score's gradient as a function of the result's gradient and the program's inputs."""

    def gradient(cotangent: jax.Array, score: jax.Array, *others: jax.Array) -> jax.Array:
        def of_score(x: jax.Array) -> jax.Array:
            return jnp.asarray(evaluated(program.jaxpr, x, *others)[0], score.dtype)

        return vjp(of_score, score)[1](cotangent)[0]

    scores = jax.ShapeDtypeStruct((), jnp.float32)
    others = program.jaxpr.in_avals[1:]
    return inlined(jax.make_jaxpr(gradient)(scores, scores, *others))
