"""cuDNN's engines as text, "6 KERNEL_CFG=2 STREAM_K=1", and the engines similar to one."""

from __future__ import annotations

import json


def similar_engines(text: str, found: str) -> tuple[str, ...]:
    """The engines to try beside one engine.

    Args:
      text: the engine; "" is the first proposal of cuDNN's heuristics.
      found: the JSON of `_cuda.engines`: the engines that cuDNN proposes, best first, and the least
        value, the largest value and the step of each of their knobs.

    Returns:
      All proposals, and the engines that differ in one knob from `text` (for "": from a proposal),
      without `text` itself. cuDNN refuses most of these.
    """
    known = json.loads(found)
    proposed: list[str] = known["proposed"]
    centres = [text] if text else proposed
    neighbours = (x for centre in centres for x in _neighbours(centre, known["knobs"]))
    untried = dict.fromkeys([*proposed, *neighbours])
    return tuple(x for x in untried if x not in ([text] if text else proposed[:1]))


def _neighbours(text: str, knobs: dict[str, dict[str, list[int]]]) -> list[str]:
    engine, *choices = text.split()
    chosen = dict(choice.split("=") for choice in choices)
    found: list[str] = []
    for knob, (least, most, step) in sorted(knobs.get(engine, {}).items()):
        for value in range(least, most + 1, max(step, 1)):
            if chosen.get(knob) != str(value):
                others = {**chosen, knob: str(value)}
                found.append(" ".join([engine, *(f"{x}={y}" for x, y in sorted(others.items()))]))
    return found
