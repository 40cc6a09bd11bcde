"""A worker of the conformance suite that misbehaves in the way that its argument names."""

from __future__ import annotations

import os
import signal
import sys
import time

from attn_dispatch import xla
from attn_dispatch_tools.verify import worker
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.suite import Conformance


class Odd(Conformance):
    """The suite for XLA, which misbehaves in cases with "causal" in their names."""

    implementation = "xla"

    is_broken = False

    def check(self, case: Case) -> Outcome:
        if "causal" in case.name and sys.argv[1] == "device":
            self.is_broken = True
        if self.is_broken:
            raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
        if "causal" not in case.name and sys.argv[1] != "wrong":
            return super().check(case)
        match sys.argv[1]:
            case "crash":
                print("as the test wants it", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "raise":
                raise RuntimeError("as the test wants it")
            case "hang":
                time.sleep(600)
            case "print":
                print("a line printed by a library")
            case "wrong":
                self.spoil()
        return super().check(case)

    def spoil(self) -> None:
        forward = xla.forward
        xla.forward = lambda *args: (forward(*args)[0] * 1.01, *forward(*args)[1:])


if __name__ == "__main__":
    worker.main(Odd())
