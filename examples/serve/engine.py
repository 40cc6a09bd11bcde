"""Continuous batching: requests join and leave while others go on.

A step has one token of each sequence that is being answered, or a draft of several, and beside them
a chunk of a prompt. admission.py says who is let in, step.py is the step.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import serving

from ..smollm2.model import Config, InputError, Params
from .admission import Admission
from .drafts import lookup
from .request import Request
from .sampling import Sampling
from .step import State, Work, step

LEAST_PAGES = 16
"""Caches of fewer pages are computed as ones of so many."""


class Engine:
    """A model that answers requests."""

    def __init__(
        self,
        params: Params,
        config: Config,
        end_id: int,
        *,
        slots: int = 16,
        page_size: int = 16,
        num_pages: int = 1024,
        chunk: int = 64,
        speculate: int = 0,
        prefix: Sequence[int] = (),
    ) -> None:
        """A model and its cache.

        Args:
          slots: the most requests at a time.
          page_size, num_pages: of the cache.
          chunk: the most tokens of a prompt in a step.
          speculate: the most tokens of a draft, up to 7; 0 drafts nothing.
          prefix: what prompts have in common at their beginning, or nothing.
        """
        if not 0 <= speculate <= 7:
            raise InputError(f"drafts of {speculate} tokens; there may be 0 to 7")
        self._params, self._config, self._end_id = params, config, end_id
        self._chunk, self._speculate = chunk, speculate
        self._state = State.new(
            config, slots + 1, num_pages, page_size, params["embed"].dtype.name
        )  # fmt: skip
        self._admission = Admission(slots, page_size, num_pages, prefix)
        self._share: Any = jax.jit(serving.share_prefix, donate_argnums=0)
        self._programs: dict[tuple[int, ...], Any] = {}
        self._sampling = self._sampling_now()
        self.on_token: Callable[[Request], object] = lambda request: None
        self.steps = self.drafted = self.accepted = 0
        self.compile_seconds = 0.0
        if prefix:
            while not self._slots[0].is_decoding:  # pyright: ignore[reportOptionalMemberAccess]
                self.step()

    @property
    def _slots(self) -> list[Request | None]:
        return self._admission.slots

    def add(self, request: Request) -> None:
        """Let a request wait its turn.

        Raises:
          InputError: it can never be answered: the prompt is empty, or too long for the model or
            the cache.
        """
        longest, room = len(request.prompt) + request.most, self._admission.room
        if not request.prompt or longest > min(self._config.context, room):
            raise InputError(
                f"a prompt of {len(request.prompt)} tokens and {request.most} new ones; there must "
                f"be one, and the model knows {self._config.context}, the cache {room} tokens"
            )
        self._admission.waiting.append(request)

    def prepare(self, longest: int | None = None) -> None:
        """Compile every program that answers may need: nothing is compiled while they are made.

        Args:
          longest: the most tokens of a request, prompt and answer; by default what the model knows.
        """
        admission, slots = self._admission, len(self._slots)
        longest = min(longest or self._config.context, self._config.context)
        least = self._cache_of(1)
        caches = {self._cache_of(x) for x in range(least, longest + 1, least)}
        caches |= {least, self._cache_of(longest)}
        for width in sorted({1, self._speculate + 1}):
            for chunk in (0, self._chunk):
                work = Work(
                    np.zeros((slots, width), np.int32), np.zeros(slots, np.int32),
                    np.zeros(chunk, np.int32), np.int32(0), np.int32(0), admission.ended.copy(),
                )  # fmt: skip
                for cache in sorted(caches):
                    self._program(work, cache)
        if self._slots[0] is not None and isinstance(self._share, jax.stages.Wrapped):
            self._share = self._share.lower(self._state.tables, 0, 1, 0).compile()

    def cancel(self, request: Request) -> None:
        """End a request that is being answered: its pages are free."""
        self._admission.end(self._slots.index(request))

    def run(self) -> None:
        """Answer all requests."""
        while not self._admission.is_idle:
            self.step()

    def step(self) -> None:
        """One step of all sequences that are there.

        Raises:
          OutOfPages: a sequence cannot grow. All are as they were; `cancel` one, and go on.
        """
        self._let_in()
        tokens = [self._next_tokens(slot) for slot in range(len(self._slots))]
        work, longest = self._work(tokens)
        program = self._program(work, longest)
        found, failed, self._state = program(self._params, self._state, work, self._sampling)
        self._admission.ended[:] = False
        if failed:
            tables = dataclasses.replace(self._state.tables, failed=jnp.zeros((), bool))
            self._state = dataclasses.replace(self._state, tables=tables)
            raise serving.OutOfPages(
                f"expected pages for {sum(map(len, tokens))} more tokens, got {self.free_pages} "
                f"free ones of {self._admission.page_size} tokens"
            )
        self.steps += 1
        found = np.asarray(found)
        for slot, new in enumerate(tokens):
            if new:
                self._take(slot, new, found[slot])

    @property
    def free_pages(self) -> int:
        tables = serving.free(self._state.tables, self._admission.ended)
        return int(tables.free_pages)

    def _let_in(self) -> None:
        before = list(self._slots)
        for slot, number in self._admission.let_in():
            tables = self._share(self._state.tables, 0, slot, number)
            self._state = dataclasses.replace(self._state, tables=tables)
        if before != self._slots:
            self._sampling = self._sampling_now()

    def _sampling_now(self) -> Sampling:
        slots = [x or Request([], 0) for x in self._slots]
        return Sampling(
            jax.device_put(np.array([x.temperature for x in slots], np.float32)),
            jax.device_put(np.array([x.top_k for x in slots], np.int32)),
            jax.device_put(np.array([x.top_p for x in slots], np.float32)),
            jax.device_put(np.array([x.seed for x in slots], np.uint32)),
        )

    def _next_tokens(self, slot: int) -> list[int]:
        """What a slot adds in this step: of prompts, that of the first slot that has one left."""
        request = self._slots[slot]
        if request is None:
            return []
        if request.is_decoding:
            last = request.answer[-1:] if slot else []
            # The last token of an answer is not read, so no draft is longer than what is left.
            most = min(self._speculate, request.most - len(request.answer) - 1)
            return last + lookup(request.prompt + request.answer, most) if most > 0 else last
        reading = (i for i, x in enumerate(self._slots) if x and not x.is_decoding)
        if slot != next(reading):
            return []
        return request.prompt[request.done : request.done + self._chunk]

    def _work(self, tokens: list[list[int]]) -> tuple[Work, int]:
        """A step of these tokens, and the most tokens that a slot may have then: a power of two of
        pages, since each is a program of its own."""
        reading = [i for i, x in enumerate(self._slots) if x and not x.is_decoding]
        chunk_slot = reading[0] if reading else 0
        chunk = np.zeros(self._chunk if reading else 0, np.int32)
        of_chunk = tokens[chunk_slot] if reading else []
        chunk[: len(of_chunk)] = of_chunk
        answers = [[] if reading and i == chunk_slot else x for i, x in enumerate(tokens)]
        width = 1 if max(map(len, answers)) <= 1 else self._speculate + 1
        drafts = np.zeros((len(tokens), width), np.int32)
        for row, new in zip(drafts, answers, strict=True):
            row[: len(new)] = new
        work = Work(
            drafts, np.array([len(x) for x in answers], np.int32), chunk, np.int32(chunk_slot),
            np.int32(len(of_chunk)), self._admission.ended.copy(),
        )  # fmt: skip
        lengths = [
            x.done + len(x.answer) + len(new)
            for x, new in zip(self._slots, tokens, strict=True)
            if x
        ]
        return work, self._cache_of(max(lengths, default=1))

    def _cache_of(self, tokens: int) -> int:
        """How many tokens a step is compiled for, where a slot has so many."""
        pages = max(self._admission.pages(tokens), LEAST_PAGES)
        room = self._state.tables.table.shape[1]
        return min(1 << (pages - 1).bit_length(), room) * self._admission.page_size

    def _program(self, work: Work, longest: int) -> Any:
        """The step compiled for these shapes, each once."""
        shapes = (work.tokens.shape[1], work.chunk.shape[0], longest)
        if shapes not in self._programs:
            started = time.perf_counter()
            self._programs[shapes] = step.lower(
                self._params, self._state, work, self._sampling, self._config, longest
            ).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._programs[shapes]

    def _take(self, slot: int, tokens: list[int], found: np.ndarray) -> None:
        """Add what follows a slot's tokens to its answer, as far as its draft was right."""
        request, right = self._slots[slot], 0
        assert request is not None
        if not request.is_decoding:
            request.done += len(tokens)
        else:
            right = int(found[-1])
            self.drafted += len(tokens) - 1
            self.accepted += right
        if slot == 0 or not request.is_decoding:
            return
        is_end = False
        for token in found[: right + 1].tolist():
            is_end = token == self._end_id
            if is_end or not request.most:
                break
            request.answer.append(token)
            self.on_token(request)
        if is_end or len(request.answer) >= request.most:
            self._admission.end(slot)
