"""Whether a call is all that its program computes: then the host's launches limit its speed.

XLA captures runs of five operations or more in a CUDA graph, which costs the host little. A program
that is one attention call is too short for that, and the host launches each of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # noqa: TID251  # the owners of MLIR's values

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core.jax_compat import ir

_NOT_COMPUTED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast_in_dim", "concatenate", "constant", "convert", "iota", "pad", "reshape", "slice",
        "transpose",
    )
)  # fmt: skip
"""Operations that only bring a program's arguments into another form."""

_RESULTS = ("out", "lse", "lse_grad")
"""Operands of a backward call that its forward call computed, or that follow from them."""

_MOST_STEPS = 8


def is_whole_program(operands: Sequence[object], options: AttentionOptions) -> bool:
    """Whether a program hands its own arguments to a call, as they are.

    A model computes query, key and value, and the gradient of the output. What follows the call
    in the program is not known yet while it is lowered.
    """
    named = zip(options.operands, operands, strict=False)
    return all(_is_argument(x) for name, x in named if name not in _RESULTS)


def _is_argument(value: Any, steps: int = _MOST_STEPS) -> bool:
    """Whether a value is an argument of the program, or one that it only brings into a form."""
    if not isinstance(value, ir.Value):
        return False
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        function: Any = owner.owner.operation
        return function.name == "func.func" and function.attributes["sym_name"].value == "main"
    operation = owner.operation
    return (
        steps > 0
        and operation.name in _NOT_COMPUTED
        and all(_is_argument(x, steps - 1) for x in operation.operands)
    )
