"""The soft cap and ALiBi arguments as nodes: the cap before a score_mod's nodes, ALiBi after."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.programs.nodes import HEAD_SLOPES, S, Tensor, Value, Writer


@dataclass(frozen=True)
class Alibi:
    """score - slope * |t + offset - s|, with one slope per head."""

    offset: int
    """The key that query 0 lines up with."""
    is_one_sided: bool
    """Whether no pair that attends has a key after the query's diagonal."""


def soft_cap(writer: Writer, score: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """cap * tanh(score / cap), and the tanh for the backward pass."""
    tanh = writer.node("f", "tanh", writer.arithmetic("f", "div", score, cap))
    return writer.arithmetic("f", "mul", tanh, cap), tanh


def soft_cap_gradient(writer: Writer, grad: Value, tanh: Tensor) -> Tensor:
    """grad * (1 - tanh²), where grad is the gradient of the capped score."""
    once = writer.arithmetic("f", "mul", grad, tanh)
    return writer.arithmetic("f", "sub", grad, writer.arithmetic("f", "mul", once, tanh))


def alibi(writer: Writer, score: Value, bias: Alibi) -> Tensor:
    """The score plus ALiBi's bias."""
    of_query = writer.arithmetic("i", "add", writer.t, bias.offset)
    distance = writer.arithmetic("i", "sub", of_query, S)
    if not bias.is_one_sided:
        distance = writer.node("i", "abs", distance)
    slopes = writer.array(HEAD_SLOPES)
    moved = writer.arithmetic("f", "mul", writer.converted(distance), slopes)
    return writer.arithmetic("f", "sub", score, moved)
