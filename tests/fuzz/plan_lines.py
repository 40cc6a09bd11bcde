"""Drawn lines for `import_plan`: real ones, and real ones with damage."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from typing import Any

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.planning_process import PlanningProcess
from attn_dispatch.devices.target import parse
from tests.fuzz import mutations
from tests.support.cudnn_calls import cudnn_attributes

SM90 = parse("sm90").properties or ""
_SMALL = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "seq_len_q": 128, "seq_len_kv": 128}
CALLS = tuple(
    cudnn_attributes(**_SMALL, **x)
    for x in ({}, {"needs_lse": True}, {"backward": True, "window_right": 0})
)

_native: Any = importlib.import_module("attn_dispatch._cuda")


def _planned_elsewhere() -> tuple[list[str], list[tuple[str, int]]]:
    """The lines and plans of the calls, made in another process."""
    process = PlanningProcess(_native)
    process.load_cudnn(cudnn_library._locate())
    lines = [process.export_plan(call, SM90) for call in CALLS]
    return lines, [process.plan(call, SM90) for call in CALLS]


LINES, PLANS = _planned_elsewhere()
_native.load_cudnn(cudnn_library._locate(), allow_stand_ins=True)


def draw(seed: int) -> str:
    """Import one line. Returns that it gave the plan, or the refusal."""
    rng = random.Random(seed)
    number = rng.randrange(len(CALLS))
    line = LINES[number]
    if not (is_whole := rng.random() < 0.1):
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            line = rng.choice(_DAMAGES)(rng, line)
    is_whole = is_whole or line == LINES[number]
    try:
        _native.import_plan(CALLS[number], SM90, line)
    except _native.CudnnError as error:
        assert not is_whole and error.code == "wrong call", (error.code, error)
        return str(error)
    found = _native.plan(CALLS[number], SM90)
    assert found == PLANS[number], (found, PLANS[number])
    return "the plan" if is_whole else "the plan, from JSON written otherwise"


def _with_facts(change: Callable[[random.Random, Any], Any]) -> Callable[..., str]:
    """A damage that changes the line's JSON, if it is still valid."""

    def damage(rng: random.Random, line: str) -> str:
        text, _, digits = line.rpartition(" ")
        try:
            return f"{json.dumps(change(rng, json.loads(text)))} {digits}"
        except (ValueError, RecursionError):
            return line

    return damage


def _in_another_order(rng: random.Random, facts: Any) -> Any:
    return dict(rng.sample(list(facts.items()), len(facts))) if isinstance(facts, dict) else [facts]


def _with_the_facts_of_another(rng: random.Random, line: str) -> str:
    return f"{rng.choice(LINES).rpartition(' ')[0]} {line.rpartition(' ')[2]}"


def _another_line(rng: random.Random, line: str) -> str:
    return rng.choice(LINES)


def _damaged(rng: random.Random, line: str) -> str:
    """Damage anywhere or, as likely, before the digits, of which a line has thousands."""
    text, space, digits = line.rpartition(" ") if rng.random() < 0.5 else (line, "", "")
    return mutations.damaged(rng, text.encode()).decode(errors="replace") + space + digits


def _empty_or_huge(rng: random.Random, line: str) -> str:
    return rng.choice(("", " ", "{}", "{} ", "{} 00", line * 3, "{} " + "0" * (2**26 + 1)))


_DAMAGES: tuple[Callable[[random.Random, str], str], ...] = (
    *[_with_facts(mutations.altered)] * 2, _with_facts(_in_another_order),
    _with_the_facts_of_another, _another_line, *[_damaged] * 3, _empty_or_huge,
)  # fmt: skip
