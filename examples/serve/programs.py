"""The compiled programs of steps, for a few shapes."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..smollm2.model import Config, Params
from .sampling import Sampling
from .step import State, Work, advance, follow

LEAST_PAGES = 16
"""The fewest pages of a cache for which a program is compiled."""


class Programs:
    def __init__(self, params: Params, config: Config, state: State, rows: int, chunk: int):
        """Programs for steps of `rows` answers and up to `chunk` tokens of prompts."""
        self._params, self._config, self._rows, self._chunk = params, config, rows, chunk
        # Programs are compiled for the shapes of the state only.
        self._state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self.compile_seconds = 0.0

    def run(
        self, state: State, work: Work, longest: int, width: int, sampling: Sampling | None
    ) -> tuple[jax.Array, State]:
        """The results of a step, see `follow`, and the state after it, without waiting for either.

        Args:
          work: the step, whose tokens are padded here.
          longest: the most tokens of a slot after the step.
          width: as for `advance`.
        """
        size = next(x for x in self._sizes(width) if x >= len(work.tokens))
        packed = np.pad(work.packed(), (0, size - len(work.tokens)))
        advanced = self._advance(packed, self._cache_of(longest), width)
        logits, state = advanced(self._params, state, packed)
        followed = self._follow(packed, width, sampling)
        found, tables, last = followed(logits, state.tables, state.last, packed, sampling)
        found.copy_to_host_async()
        return found, State(tables, last, state.pools)

    def prepare(self, longest: int, widths: set[int], sampling: Sampling) -> None:
        """Compile all programs for sequences of up to `longest` tokens and these widths."""
        least = self._cache_of(1)
        caches = {self._cache_of(x) for x in range(least, longest + 1, least)}
        caches |= {least, self._cache_of(longest)}
        for width in sorted(widths):
            for size in self._sizes(width):
                packed = np.zeros(3 * self._state.last.size + size, np.int32)
                for cache in sorted(caches):
                    self._advance(packed, cache, width)
                for x in (None, sampling):
                    self._follow(packed, width, x)

    def _sizes(self, width: int) -> tuple[int, int]:
        """The numbers of tokens that steps are padded to."""
        return self._rows * width, self._rows * width + self._chunk

    def _cache_of(self, tokens: int) -> int:
        """The cache size, in tokens, for which a step is compiled if its longest sequence has
        `tokens`: a power of two of pages."""
        tables = self._state.tables
        pages = max(-(-tokens // tables.page_size), LEAST_PAGES)
        return min(1 << (pages - 1).bit_length(), tables.table.shape[1]) * tables.page_size

    def _advance(self, packed: np.ndarray, longest: int, width: int) -> Any:
        return self._once(
            ("advance", packed.size, longest, width),
            lambda: advance.lower(self._params, self._state, packed, self._config, longest, width),
        )

    def _follow(self, packed: np.ndarray, width: int, sampling: Sampling | None) -> Any:
        tables, last = self._state.tables, self._state.last
        shape = (last.size, width, self._params["embed"].shape[0])
        logits = jax.ShapeDtypeStruct(shape, jnp.float32)
        return self._once(
            ("follow", packed.size, width, sampling is None),
            lambda: follow.lower(logits, tables, last, packed, sampling),
        )

    def _once(self, name: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        if name not in self._compiled:
            started = time.perf_counter()
            self._compiled[name] = lower().compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[name]
