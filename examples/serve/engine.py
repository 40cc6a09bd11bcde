"""Continuous batching: requests join and leave while others are answered.

A step has one token, or a draft of several, for each answer in progress, and a chunk of the prompts
that are still to be read. admission.py admits requests, step.py computes the step.

A step is sent to the device before the results of the step before are read: the device has the last
tokens, so it need not wait for the host. The host then learns one step late that a sequence has
ended, and drops the token that was computed meanwhile. Drafts depend on the results, so with drafts
each step is read at once.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from attn_dispatch import serving

from ..smollm2.model import Config, InputError, Params, by_layer
from .admission import Admission
from .drafts import lookup
from .programs import Programs
from .request import Request
from .sampling import Sampling
from .step import FAILED, LAST, State, Work


@dataclasses.dataclass(frozen=True)
class SlotTokens:
    """The tokens of one request in a step."""

    slot: int
    request: Request
    tokens: list[int]
    is_answer: bool
    """Whether the tokens belong to the answer, not to the prompt."""
    follows: bool
    """Whether the token after them belongs to the answer."""


@dataclasses.dataclass(frozen=True)
class SentStep:
    """A step that was sent to the device, and its results, see `follow`."""

    parts: list[SlotTokens]
    found: jax.Array


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
          page_size, num_pages: the sizes of the cache.
          chunk: the most tokens of prompts in a step.
          speculate: the most guesses in a draft, up to 7; 0 makes no drafts.
          prefix: tokens with which prompts begin, if they have any in common.
        """
        if not 0 <= speculate <= 7:
            raise InputError(f"drafts of {speculate} tokens; there may be 0 to 7")
        self._config, self._end_id = config, end_id
        self._chunk, self._speculate = chunk, speculate
        self._admission = Admission(slots, page_size, num_pages, prefix)
        self._state = State.new(
            config, len(self._slots), num_pages, page_size, params["embed"].dtype.name
        )
        self._share: Any = jax.jit(serving.share_prefix, donate_argnums=0)
        self._programs = Programs(by_layer(params), config, self._state, slots, chunk)
        self._sampling: Sampling | None = None
        self._sent: collections.deque[SentStep] = collections.deque()
        self.on_token: Callable[[Request], object] = lambda request: None
        self.steps = self.steps_with_prompts = self.drafted = self.accepted = 0
        self.waiting_seconds = 0.0
        while self._admission.reading:
            self.step()
        self.drain()

    @property
    def _slots(self) -> list[Request | None]:
        return self._admission.slots

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
          InputError: the request can never be answered: the prompt is empty, or prompt and answer
            are too long for the model or the cache.
        """
        longest, room = len(request.prompt) + request.most, self._admission.room
        most = min(self._config.context, room)
        if not request.prompt or longest > most:
            raise InputError(
                f"expected a prompt of at least 1 token, and with its answer at most {most} "
                f"(model: {self._config.context}, cache: {room}), got a prompt of "
                f"{len(request.prompt)} and an answer of {request.most}"
            )
        self._admission.waiting.append(request)

    def prepare(self, longest: int | None = None) -> None:
        """Compile every program that answers may need, so that nothing is compiled later.

        Args:
          longest: the most tokens of a request, prompt and answer; default: the model's context.
        """
        longest = min(longest or self._config.context, self._config.context)
        self._programs.prepare(longest, {1, self._speculate + 1}, self._sampling_now())
        if self._admission.prefix_slot is not None and isinstance(self._share, jax.stages.Wrapped):
            self._share = self._share.lower(self._state.tables, 0, 1, 0).compile()

    def cancel(self, request: Request) -> None:
        """End a request that is being answered, and free its pages."""
        self._admission.end(self._slots.index(request))

    def run(self) -> None:
        """Answer all requests."""
        while not self.is_idle:
            self.step()

    def step(self) -> None:
        """Send one step of all current sequences, and read the step before.

        Raises:
          OutOfPages: there were too few pages for the step that was read. All sequences are as they
            were before it; `cancel` one, and go on.
        """
        self._admit()
        parts = self._next_parts()
        if parts:
            self._sent.append(SentStep(parts, self._send(parts)))
        self.drain(1 if parts and not self._speculate else 0)

    def drain(self, keep: int = 0) -> None:
        """Read the results of the steps that were sent, without the last `keep` steps.

        Raises:
          OutOfPages: as for `step`.
        """
        while len(self._sent) > keep:
            self._read(self._sent.popleft())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to answer or to read."""
        return self._admission.is_idle and not self._sent

    @property
    def compile_seconds(self) -> float:
        return self._programs.compile_seconds

    @property
    def free_pages(self) -> int:
        tables = serving.free(self._state.tables, self._admission.ended)
        return int(tables.free_pages)

    def _admit(self) -> None:
        before = list(self._slots)
        for slot, number in self._admission.admit():
            source = self._admission.prefix_slot
            tables = self._share(self._state.tables, source, slot, number)
            self._state = dataclasses.replace(self._state, tables=tables)
        if before != self._slots:
            is_drawn = any(x and x.temperature > 0 for x in self._slots)
            self._sampling = self._sampling_now() if is_drawn else None

    def _sampling_now(self) -> Sampling:
        slots = [x or Request([], 0) for x in self._slots]
        return Sampling(
            jax.device_put(np.array([x.temperature for x in slots], np.float32)),
            jax.device_put(np.array([x.top_k for x in slots], np.int32)),
            jax.device_put(np.array([x.top_p for x in slots], np.float32)),
            jax.device_put(np.array([x.seed for x in slots], np.uint32)),
        )

    def _next_parts(self) -> list[SlotTokens]:
        """The tokens of the next step, in the order of the slots."""
        parts, room = [], self._chunk
        for slot, request in enumerate(self._slots):
            if request and request.is_decoding and request.left > 0:
                # Each step adds one token besides the guesses, so an answer with n tokens left has
                # at most n - 1 guesses.
                most = min(self._speculate, request.left - 1)
                draft = lookup(request.prompt + request.answer, most) if most > 0 else []
                parts.append(SlotTokens(slot, request, [LAST, *draft], True, True))
        for slot in self._admission.reading:
            request = self._slots[slot]
            assert request is not None
            tokens = request.prompt[request.done : request.done + room]
            if tokens:
                follows = request.done + len(tokens) == len(request.prompt) and request.most > 0
                parts.append(SlotTokens(slot, request, tokens, False, follows))
            room -= len(tokens)
        return sorted(parts, key=lambda x: x.slot)

    def _send(self, parts: list[SlotTokens]) -> jax.Array:
        """Send a step with these tokens to the device, and count the tokens as read."""
        longest = width = 1
        number, drafts = np.zeros((2, len(self._slots)), np.int32)
        tokens: list[int] = []
        for x in parts:
            number[x.slot] = len(x.tokens)
            tokens += x.tokens
            if x.is_answer:
                drafts[x.slot] = len(x.tokens) - 1
                width = width if len(x.tokens) == 1 else self._speculate + 1
            else:
                x.request.done += len(x.tokens)
            longest = max(
                longest, x.request.done + len(x.request.answer) + x.request.coming + drafts[x.slot]
            )
            x.request.coming += x.follows
        work = Work(number, drafts, self._admission.ended, tokens)
        found, self._state = self._programs.run(
            self._state, work, int(longest), width, self._sampling
        )
        self._admission.ended[:] = False
        return found

    def _read(self, step: SentStep) -> None:
        """Wait for the results of a step, and add them to the answers."""
        started = time.perf_counter()
        found = np.asarray(step.found)
        self.waiting_seconds += time.perf_counter() - started
        if (found[:, -1] == FAILED).any():
            number = sum(len(x.tokens) for x in step.parts)
            self._undo(step)
            raise serving.OutOfPages(
                f"expected pages for {number} more tokens, got {self.free_pages} free ones of "
                f"{self._admission.page_size} tokens"
            )
        self.steps += 1
        self.steps_with_prompts += not all(x.is_answer for x in step.parts)
        for x in step.parts:
            # Drop the results of requests that have ended or were cancelled in the meantime.
            if self._slots[x.slot] is x.request:
                self._take(x, found[x.slot])

    def _undo(self, step: SentStep) -> None:
        """Forget a failed step and those sent after it, none of which changed anything."""
        for x in (x for sent in (step, *self._sent) for x in sent.parts):
            x.request.done -= 0 if x.is_answer else len(x.tokens)
            x.request.coming -= x.follows
        self._sent.clear()
        tables = serving.recovered(self._state.tables)
        self._state = dataclasses.replace(self._state, tables=tables)

    def _take(self, part: SlotTokens, found: np.ndarray) -> None:
        """Add the accepted guesses and the token after them to an answer, up to its end."""
        request, right = part.request, int(found[-1])
        request.coming -= part.follows
        if part.is_answer:
            self.drafted += len(part.tokens) - 1
            self.accepted += right
        is_end = not request.most and request.is_decoding
        for token in found[: right + 1].tolist() if part.follows else ():
            is_end = token == self._end_id
            if is_end:
                break
            request.answer.append(token)
            self.on_token(request)
            is_end = len(request.answer) >= request.most
        if is_end and part.slot != self._admission.prefix_slot:
            self._admission.end(part.slot)
