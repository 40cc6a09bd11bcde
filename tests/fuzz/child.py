"""A child process that runs draws, with limits on time and memory.

A module of this folder has `draw(seed: int) -> str`. It draws one input, passes it to the code
under test and returns the outcome as a word or a sentence. It catches the errors that the code
should raise; any other exception is a failure, as are a signal, a timeout and too much memory. If
the module has `prepare()`, that is called once before the time of the first draw starts.
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
"""The number of draws of each test. 0 means the number that the test names for CI."""

_START_SECONDS = 60.0


def outcomes(
    module: str,
    seeds: Iterable[int],
    *,
    seconds: float = 2.0,
    memory: int = 8 * 2**30,
    environment: Mapping[str, str] | None = None,
) -> Counter[str]:
    """Run draws in a child and count their outcomes.

    Args:
      module: the name of a module with `draw`, "tests.fuzz.winner_files".
      seeds: one for each draw.
      seconds: the time limit of one draw.
      memory: the bytes of address space that the child may map after its module is imported.
      environment: variables of the child in addition to those of this process.

    Raises:
      AssertionError: a draw raised, ended the child, took too long or too much memory. The message
        lists these seeds and the command that repeats a draw.
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
    # Output of the code under test must not be read as an answer.
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
