"""The bytes that a device sends to others, counted in a compiled program."""

from __future__ import annotations

import math
import re

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|reduce-scatter|all-reduce|collective-permute)(-start)?\("
)


def sent(text: str, devices: int) -> float:
    """The bytes that a device sends in a compiled program: the mean of all devices.

    What a device keeps is not sent. Collectives in a loop count once.

    Args:
      text: the program, as `compiled.as_text()` gives it.
      devices: how many devices run it.
    """
    total = 0.0
    for line in text.splitlines():
        if (found := _COLLECTIVE.search(line)) is None:
            continue
        shapes, kind, is_start = found.groups()
        sizes = [
            _WIDTHS[dtype] * math.prod(int(x) for x in dims.split(",") if x)
            for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
        ]
        if is_start and kind != "all-reduce":  # the type lists operands, then as many results
            sizes = sizes[len(sizes) // 2 :]
        total += sum(sizes) * _share(kind, line, devices)
    return total


def _share(kind: str, line: str, devices: int) -> float:
    """The bytes that a device sends for each byte of the results."""
    if kind == "collective-permute":
        found = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        assert found is not None, line
        pairs = re.findall(r"(\d+),(\d+)", found[1])
        return sum(x != y for x, y in pairs) / devices
    group = _group(line, devices)
    return {
        "all-to-all": (group - 1) / group, "all-gather": (group - 1) / group,
        "reduce-scatter": group - 1, "all-reduce": 2 * (group - 1) / group,
    }[kind]  # fmt: skip


def _group(line: str, devices: int) -> int:
    """How many devices exchange with each other."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[x]) for x in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    return devices
