"""A lowered module without calls of its functions, as XLA has it before it decides shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # noqa: TID251  # MLIR's operations

from attn_dispatch.core.jax_compat import ir


def inline_calls(module: Any) -> None:
    """Replace each call of a function in the module by the function's operations."""
    functions = {x.name.value: x for x in module.body.operations if x.operation.name == "func.func"}
    done: set[str] = set()

    def inline(function: str) -> Any:
        """The only block of a function, after its own calls are replaced."""
        block = functions[function].regions[0].blocks[0]
        if function not in done:
            done.add(function)
            within(block)
        return block

    def within(block: Any) -> None:
        for operation in [x.operation for x in block.operations]:
            if operation.name == "func.call":
                callee = inline(operation.attributes["callee"].value)
                results = _copied(callee, list(operation.operands), ir.InsertionPoint(operation))
                for old, new in zip(operation.results, results, strict=True):
                    old.replace_all_uses_with(new)
                operation.erase()
                continue
            for region in operation.regions:
                for inner in region.blocks:
                    within(inner)

    inline("main")


def _copied(block: Any, arguments: Sequence[Any], where: Any) -> list[Any]:
    """Copy a function's operations to another place, and return its results there.

    Args:
      block: the block of the function.
      arguments: the values that stand for its arguments.
      where: the insertion point of the copies.
    """
    now = dict(zip(block.arguments, arguments, strict=True))
    *operations, end = [x.operation for x in block.operations]
    for operation in operations:
        copy = operation.clone(where)
        _rename(copy, now)
        now.update(zip(operation.results, copy.results, strict=True))
    return [now[x] for x in end.operands]


def _rename(operation: Any, now: dict[Any, Any]) -> None:
    """Replace the operands of an operation, and of those within it."""
    for i, value in enumerate(operation.operands):
        if value in now:
            operation.operands[i] = now[value]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rename(inner.operation, now)
