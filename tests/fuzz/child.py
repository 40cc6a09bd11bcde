"""Draws that may end a process run in a child, which is watched: its time, its memory, its end.

A module of this folder has `draw(seed: int) -> str`. It draws one input, hands it to the code under
test and returns what came of it, a word or a sentence. It catches the errors that the code is meant
to raise; any other exception is a failure, as are a signal, a silence and too much memory. Where it
has `prepare()` as well, that is called once, before the first draw's time runs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from attn_dispatch.cudnn.helper_process import Helper, HelperEnded
from tests.support.repository import ROOT

DRAWS = int(os.environ.get("ATTN_DISPATCH_TEST_FUZZ", "0"))
"""How many draws each test makes; 0: as many as the test names for CI."""

_START_SECONDS = 60.0


def outcomes(
    module: str,
    seeds: Iterable[int],
    *,
    seconds: float = 2.0,
    memory: int = 8 * 2**30,
    environment: Mapping[str, str] | None = None,
) -> Counter[str]:
    """How often each outcome was drawn.

    Args:
      module: the name of a module with `draw`, "tests.fuzz.winner_files".
      seeds: one for each draw.
      seconds: the longest that one draw may take.
      memory: bytes of address space beyond what the child has mapped when its module is imported.
      environment: variables of the child beside this process's own.

    Raises:
      AssertionError: a draw raised, ended the child, took too long or too much memory. The message
        has every seed that did, and the way to repeat it.
    """
    counts: Counter[str] = Counter()
    failures: list[str] = []
    child: Helper | None = None
    for seed in seeds:
        if child is None:
            child = _start(module, memory, environment or {})
        try:
            answer = json.loads(child.ask(f"{seed}\n".encode(), seconds))
        except HelperEnded as ended:
            failures.append(f"seed {seed}: {ended}")
            child = None
            continue
        if "failure" in answer:
            failures.append(f"seed {seed}: {answer['failure']}")
        else:
            counts[answer["outcome"]] += 1
    if child is not None:
        child.end()
    repeat = f"python -m tests.fuzz.child {module} SEED"
    assert not failures, "\n".join([f"{len(failures)} draws failed; {repeat}", *failures[:20]])
    return counts


def _start(module: str, memory: int, environment: Mapping[str, str]) -> Helper:
    words = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    variables = [f"{name}={value}" for name, value in {**words, **environment}.items()]
    command = [sys.executable, "-m", "tests.fuzz.child", module, "--memory", str(memory)]
    child = Helper(["/usr/bin/env", *variables, *command])
    assert child.ask(b"ready\n", _START_SECONDS) == b"ready\n"
    return child


def _limit_memory(memory: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))


def _answer(draw, seed: int) -> dict[str, str]:
    try:
        return {"outcome": draw(seed)}
    except BaseException:
        return {"failure": traceback.format_exc(limit=-6)}


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    if sys.argv[2] != "--memory":
        print(module.draw(int(sys.argv[2])))
        return
    # Whatever the code under test prints is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            if line == "ready\n":
                getattr(module, "prepare", lambda: None)()
                if (memory := int(sys.argv[3])) > 0:
                    _limit_memory(memory)
                answers.write(line)
            else:
                answers.write(json.dumps(_answer(module.draw, int(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
