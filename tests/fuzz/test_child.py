"""The child for draws reports an exception, a signal, a timeout and too much memory."""

import os
import signal
import time

import pytest

from tests.fuzz.child import outcomes


def draw(seed: int) -> str:
    """Misbehave in a way that depends on the seed. The child imports this module."""
    if seed == 1:
        raise KeyError("unexpected")
    if seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 3:
        time.sleep(60)
    if seed == 4:
        bytearray(2**31)
    return "even" if seed % 2 == 0 else "odd"


def test_outcomes_are_counted():
    assert outcomes("tests.fuzz.test_child", range(10, 15)) == {"even": 3, "odd": 2}


def test_every_failure_is_listed_and_the_other_draws_run():
    with pytest.raises(AssertionError) as raised:
        outcomes("tests.fuzz.test_child", [10, 1, 2, 3, 4, 11], seconds=1.0, memory=2**30)
    message = str(raised.value)
    assert "4 draws failed" in message
    assert "seed 1: Traceback" in message and "KeyError: 'unexpected'" in message
    assert "seed 2: was ended by signal 11" in message
    assert "seed 3: did not answer in 1 s" in message
    assert "seed 4: Traceback" in message and "MemoryError" in message
