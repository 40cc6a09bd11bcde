"""Programs lowered for platforms that are not present, and the custom calls in their text."""

from __future__ import annotations

import re
from typing import Any


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
