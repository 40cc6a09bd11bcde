"""Programs lowered for platforms that are not present, and the custom calls in their text."""

from __future__ import annotations

import re
from typing import Any

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
