"""The kernels in the optimized HLO of a program, and those in the list of `explain_program`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attn_dispatch import ProgramExplanation
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.verdict import Verdict

_RUNS = re.compile(r' custom-call(?:-start)?\(.*custom_call_target="(attn_dispatch_cudnn_\w+)"')


@dataclass(frozen=True)
class Kernel:
    """What both an entry of the list and a custom call of cuDNN's say of a kernel."""

    target: str
    dtype: str
    query_elements: int
    """The number of elements of the array of queries, which may be packed."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool
    workspace_bytes: int


def listed(found: ProgramExplanation) -> Counter[Kernel]:
    """How often each kernel in a list runs."""
    runs: Counter[Kernel] = Counter()
    for call in found.calls:
        for direction, verdicts, times in (
            ("forward", call.explanation.forward, call.forward_runs.times),
            ("backward", call.explanation.backward, call.backward_runs.times),
        ):
            chosen = [x for x in verdicts if x.is_eligible][:1]
            assert not verdicts or chosen, f"nothing runs {direction}"
            for verdict in chosen:
                assert times, f"it is not known how often {direction} runs"
                runs[_listed_kernel(call.explanation.call, direction, verdict)] += times
    return runs


def _listed_kernel(call: AttentionSpec, direction: str, verdict: Verdict) -> Kernel:
    assert verdict.plan is not None
    query = call.shape("query")
    return Kernel(
        f"attn_dispatch_{verdict.implementation}_{direction}",
        call.dtype_of("query"),
        math.prod(query),
        query[-2],
        call.shape("key")[-2],
        query[-1],
        call.meaning.scale,
        call.meaning.is_causal,
        verdict.plan.workspace_bytes,
    )


def compiled(text: str) -> Counter[Kernel]:
    """How often each custom call of cuDNN's runs in one run of a module of optimized HLO.

    Args:
      text: the module, as `Compiled.as_text` returns it. Each loop around such a call must have a
        known number of rounds.
    """
    bodies, entry = _computations(text)
    runs: Counter[Kernel] = Counter()

    def count(name: str, times: int) -> None:
        for line in bodies[name]:
            if _RUNS.search(line):
                runs[_compiled_kernel(line)] += times
            for called, rounds in _called(line):
                if called in with_kernels:
                    assert rounds is not None, f"a loop with a kernel, and no known rounds: {line}"
                    count(called, times * rounds)

    with_kernels = _with_kernels(bodies)
    count(entry, 1)
    return runs


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the one that is the program."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if begins := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = begins[2]
            bodies[name] = []
            entry = name if begins[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name:
            bodies[name].append(line)
    assert entry, "the module has no entry"
    return bodies, entry


def in_all(text: str, number: Callable[[str], float]) -> float:
    """The sum of a number of instructions over one run of a module of optimized HLO.

    Args:
      text: the module, whose loops have known numbers of rounds where the number is not 0.
      number: returns the number of some lines.
    """
    bodies, entry = _computations(text)

    def total(name: str) -> float:
        found = number("\n".join(bodies[name]))
        for line in bodies[name]:
            for called, rounds in _called(line):
                inner = total(called) if called in bodies else 0.0
                assert rounds is not None or not inner, f"no known rounds: {line}"
                found += inner * (rounds or 0)
        return found

    return total(entry)


def in_loops(text: str) -> tuple[list[str], list[str]]:
    """The instructions of a module of optimized HLO that run inside of loops, and all others."""
    bodies, entry = _computations(text)
    found: dict[str, bool] = {}

    def visit(name: str, is_inside: bool) -> None:
        if found.get(name, False) or found.get(name) == is_inside:
            return
        found[name] = is_inside
        for line in bodies[name]:
            for called, _ in _called(line):
                visit(called, is_inside or " while(" in line)

    visit(entry, False)
    inside, outside = list[str](), list[str]()
    for name, is_inside in found.items():
        (inside if is_inside else outside).extend(bodies[name])
    return inside, outside


_CALLED = re.compile(r"\b(?:to_apply|calls|body|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def _called(line: str) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs, and how often; None if that is not known."""
    if re.search(r" [\w-]+-(?:update|done)\(", line):
        return  # what its start began
    rounds = _ROUNDS.search(line)
    for names in _CALLED.findall(line):
        for name in re.findall(r"[\w.-]+", names):
            if " while(" in line:
                yield name, int(rounds[1]) if rounds else None
            else:
                yield name, 1


def _with_kernels(bodies: dict[str, list[str]]) -> set[str]:
    """The computations that run a custom call of cuDNN's, or call one that does."""
    found = {name for name, lines in bodies.items() if any(_RUNS.search(x) for x in lines)}
    while True:
        callers = {
            name
            for name, lines in bodies.items()
            if any(called in found for line in lines for called, _ in _called(line))
        }
        if callers <= found:
            return found
        found |= callers


def _compiled_kernel(line: str) -> Kernel:
    target = _RUNS.search(line)
    # Arrays of positions, which packed calls have, come before the queries [..., heads, dim].
    query = re.search(r"operand_layout_constraints=.*?\[(\d+(?:,\d+){2,})\]", line)
    workspace = re.search(r"u8\[(\d+)\]\S*\) custom-call", line)
    assert target and query and workspace, line
    attributes = dict(re.findall(r"\b(\w+) = ([^,}]+)", line.split("backend_config=", 1)[1]))

    def number(name: str) -> float:
        return float(attributes[name].split(" : ")[0])

    return Kernel(
        target[1],
        attributes["dtype"].strip('\\"'),
        math.prod(int(x) for x in query[1].split(",")),
        int(number("num_heads")),
        int(number("num_kv_heads")),
        int(number("head_dim")),
        number("scale"),
        number("window_right") == 0,
        int(workspace[1]),
    )
