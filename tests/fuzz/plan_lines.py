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

_VALUES = (None, True, 0, -1, 2**63, 1e308, "", "0", [], {}, [[]] * 3, "x" * 10**5)


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


def _facts(change: Callable[[random.Random, dict[str, Any]], Any]) -> Callable[..., str]:
    """A damage that changes the line's JSON, if it is still valid."""

    def damage(rng: random.Random, line: str) -> str:
        text, _, digits = line.rpartition(" ")
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError):
            return line
        if not isinstance(facts, dict):
            return line
        return f"{json.dumps(change(rng, facts))} {digits}"

    return damage


def _without_a_fact(rng: random.Random, facts: dict[str, Any]) -> dict[str, Any]:
    facts.pop(rng.choice([*facts, ""]), None)
    return facts


def _with_another_value(rng: random.Random, facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {rng.choice([*facts, "workspace_bytes", "buffer_bytes"]): rng.choice(_VALUES)}


def _in_another_order(rng: random.Random, facts: dict[str, Any]) -> dict[str, Any]:
    return dict(rng.sample(list(facts.items()), len(facts)))


def _of_another_kind(rng: random.Random, facts: dict[str, Any]) -> Any:
    return rng.choice([[facts], list(facts.items()), "text", 3, None])


def _with_the_facts_of_another(rng: random.Random, line: str) -> str:
    return f"{rng.choice(LINES).rpartition(' ')[0]} {line.rpartition(' ')[2]}"


def _another_line(rng: random.Random, line: str) -> str:
    return rng.choice(LINES)


def _cut(rng: random.Random, line: str) -> str:
    return line[: rng.choice((rng.randrange(len(line) + 1), rng.randrange(2000), len(line) - 1))]


def _with_other_characters(rng: random.Random, line: str) -> str:
    at = rng.choice((rng.randrange(len(line) + 1), rng.randrange(min(len(line), 2000) + 1)))
    other = rng.choice(("0", "f", "G", " ", "\x00", "é", '"', "}", "\n", " " * 1000))
    return line[:at] + other + line[at + rng.randrange(2) :]


def _nested(rng: random.Random, line: str) -> str:
    deep = rng.choice((10, 10**5)) * rng.choice(("[", '{"key":', "[{"))
    return f"{deep} {line.rpartition(' ')[2]}"


def _empty_or_huge(rng: random.Random, line: str) -> str:
    return rng.choice(("", " ", "{}", "{} ", "{} 00", line * 3, "{} " + "0" * (2**26 + 1)))


_DAMAGES: tuple[Callable[[random.Random, str], str], ...] = (
    _facts(_without_a_fact),
    _facts(_with_another_value),
    _facts(_in_another_order),
    _facts(_of_another_kind),
    _with_the_facts_of_another,
    _another_line,
    _cut,
    _with_other_characters,
    _nested,
    _empty_or_huge,
)
