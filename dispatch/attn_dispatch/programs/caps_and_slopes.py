"""The soft cap and ALiBi arguments as nodes, on both sides of a score_mod's."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.programs.nodes import HEAD_SLOPES, Register, S, Value, Writer


@dataclass(frozen=True)
class Alibi:
    """score - slope * |t + offset - s|, with a slope for each head."""

    offset: int
    """The key that query 0 lines up with."""
    is_one_sided: bool
    """Whether all pairs that count are of a key at or before that of the query."""


def soft_cap(writer: Writer, score: Register, cap: float) -> tuple[Register, Register]:
    """cap * tanh(score / cap), and the tanh."""
    tanh = writer.node("f", "tanh", writer.arithmetic("f", "div", score, cap))
    return writer.arithmetic("f", "mul", tanh, cap), tanh


def soft_cap_gradient(writer: Writer, grad: Value, tanh: Register) -> Register:
    """grad * (1 - tanh²), of the gradient of what soft_cap returned."""
    once = writer.arithmetic("f", "mul", grad, tanh)
    return writer.arithmetic("f", "sub", grad, writer.arithmetic("f", "mul", once, tanh))


def alibi(writer: Writer, score: Value, how: Alibi) -> Register:
    """The score as ALiBi makes it."""
    of_query = writer.arithmetic("i", "add", writer.t, how.offset)
    distance = writer.arithmetic("i", "sub", of_query, S)
    if not how.is_one_sided:
        distance = writer.node("i", "abs", distance)
    slopes = writer.array(HEAD_SLOPES)
    moved = writer.arithmetic("f", "mul", writer.converted(distance), slopes)
    return writer.arithmetic("f", "sub", score, moved)
