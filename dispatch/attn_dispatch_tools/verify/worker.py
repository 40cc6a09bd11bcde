"""Runs cases in a process of its own: a case on each line of stdin, its outcome on stdout.

usage: python -m attn_dispatch_tools.verify.worker IMPLEMENTATION

A line is a case of the table by name, or any case as a JSON object. The answer is one line of
JSON. What else is written, by whatever library, goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")  # read when a call is compiled

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.suite import Conformance

_TRACEBACK_LINES = 12


def main(suite: Conformance) -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(suite, case_of(line)).to_json()), file=answers, flush=True)


def case_of(line: str) -> Case:
    """The case that a line asks for."""
    line = line.strip()
    return Case.from_json(json.loads(line)) if line.startswith("{") else BY_NAME[line]


def run(suite: Conformance, case: Case) -> Outcome:
    """The outcome of a case; an exception is one as well."""
    try:
        return suite.check(case)
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        said = "\n".join(lines[-_TRACEBACK_LINES:])
        return Outcome(case.name, case.family).failed(f"raised {type(error).__name__}: {said}")


if __name__ == "__main__":
    chosen = Conformance()
    chosen.implementation = sys.argv[1]
    main(chosen)
