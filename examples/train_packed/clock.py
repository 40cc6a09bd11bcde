"""The speed of a run: real tokens per second between the arrivals of losses, without padding."""

import contextlib
import time
from collections.abc import Iterator

import jax


class Clock:
    """Measures tokens/s from the arrival of the first loss on."""

    def __init__(self, compile_seconds: float):
        self.compile_seconds = compile_seconds
        self.all_tokens = 0
        self._began: float | None = None
        self._now = 0.0
        self._tokens = self._steps = 0

    def arrived(self, loss: jax.Array, tokens: int) -> float:
        """Wait for the loss of a step with this number of tokens, and return it."""
        value = float(loss)
        self._now = time.perf_counter()
        self.all_tokens += tokens
        if self._began is None:
            self._began = self._now
        else:
            self._tokens += tokens
            self._steps += 1
        return value

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        before = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - before

    @property
    def _seconds(self) -> float:
        return self._now - (self._began or 0)

    @property
    def rate(self) -> float:
        """Tokens/s; NaN before the second step."""
        return self._tokens / self._seconds if self._steps else float("nan")

    @property
    def step_seconds(self) -> float:
        return self._seconds / self._steps if self._steps else float("nan")
