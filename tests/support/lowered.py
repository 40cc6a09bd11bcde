"""Programs lowered for platforms that are not present, and the custom calls in their text."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np

from attn_dispatch.cudnn.call import Attribute, Attributes


def lowered_for_cuda(function: Any, *arguments: Any) -> str:
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls_in(module: str) -> dict[str, tuple[str, list[str], list[str]]]:
    """Our custom calls in a module, by name: the line, and the types of operands and results."""
    calls = {}
    for line in module.splitlines():
        if found := re.search(r"custom_call @(attn_dispatch_\w+)\(", line):
            name, operands, results = found[1], *line.rsplit(" : (", 1)[1].split(") -> ")
            assert name not in calls, "each call of a module is lowered once"
            calls[name] = (line, *(re.findall(r"tensor<(.*?)>", x) for x in (operands, results)))
    return calls


def attributes_in(line: str) -> dict[str, str]:
    """The attributes of a custom call, as its line prints them."""
    found = re.search(r"mhlo.backend_config = \{(.*?)\}", line)
    assert found
    return dict(re.findall(r'(\w+) = ("[^"]*"|[^,]+)', found[1]))


def printed_attributes(attributes: Attributes) -> dict[str, str]:
    """The attributes as MLIR prints them."""
    return {name: _printed(x) for name, x in attributes.items()}


def _printed(x: Attribute) -> str:
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, float):
        return f"{np.float32(x):e} : f32"
    return f"{x} : i64" if isinstance(x, int) else f'"{x}"'


def kernel_runs(function: Any, *arguments: Any) -> Counter[tuple[str, int]]:
    """The custom calls of the program lowered for CUDA: how often each runs, by its name and the
    size of its first operand with rows, heads and dims. Loops must have a known number of rounds.
    """
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {x.name.value: x for x in module.body.operations if x.operation.name == "func.func"}
    found: Counter[tuple[str, int]] = Counter()

    def count(region: Any, times: int) -> None:
        for operation in (x for block in region.blocks for x in block.operations):
            name = operation.operation.name
            if name == "func.call":
                callee = operation.attributes["callee"].value
                count(functions[callee].regions[0], times)
            elif name == "stablehlo.while":
                count(operation.regions[1], times * _rounds(operation.regions[0]))
            elif name == "stablehlo.custom_call":
                target = operation.attributes["call_target_name"].value
                shapes = [x.type.shape for x in operation.operands]
                query = next((x for x in shapes if len(x) >= 3), ())
                found[target, math.prod(query)] += times
            else:
                for inner in operation.regions:
                    count(inner, times)

    count(functions["main"].regions[0], 1)
    return found


def _rounds(condition: Any) -> int:
    """The number of rounds of a loop that compares a counter, from 0 on, with a constant."""
    constants = [
        operation.attributes["value"]
        for operation in condition.blocks[0].operations
        if operation.operation.name == "stablehlo.constant"
    ]
    (limit,) = constants
    return int(limit.get_splat_value().value)
