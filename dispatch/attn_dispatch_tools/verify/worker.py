"""A process that runs cases: one case on each line of stdin, its outcome on stdout.

usage: python -m attn_dispatch_tools.verify.worker IMPLEMENTATION

A line is the name of a case in the table, or any case as a JSON object. The answer is one line of
JSON. Whatever libraries print goes to stderr.
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
    """Run the case on each line of stdin, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(suite, case_of(line)).to_json()), file=answers, flush=True)


def case_of(line: str) -> Case:
    """The case on a line."""
    line = line.strip()
    return Case.from_json(json.loads(line)) if line.startswith("{") else BY_NAME[line]


def run(suite: Conformance, case: Case) -> Outcome:
    """The outcome of a case; an exception is a failure."""
    try:
        return suite.check(case)
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        last_lines = "\n".join(lines[-_TRACEBACK_LINES:])
        failure = f"raised {type(error).__name__}: {last_lines}"
        return Outcome(case.name, case.family).failed(failure)


if __name__ == "__main__":
    chosen = Conformance()
    chosen.implementation = sys.argv[1]
    main(chosen)
