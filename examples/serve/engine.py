"""Continuous batching: requests join and leave while others go on.

A step has one token of each sequence that is being answered, and beside them a chunk of a prompt. A
request is let in when there are pages for all that it may become, so that none runs out. Slot 0
holds what all prompts begin with: its full pages are shared.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import serving

from ..smollm2.model import Config, InputError, Params
from .step import State, step


@dataclasses.dataclass
class Request:
    """A prompt and what became of it."""

    prompt: list[int]
    most: int
    """The most tokens of the answer."""
    temperature: float = 0.0
    answer: list[int] = dataclasses.field(default_factory=list)
    done: int = 0
    """Tokens of the prompt that are in the cache."""

    @property
    def is_decoding(self) -> bool:
        return self.done == len(self.prompt)


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
        prefix: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """A model and its cache.

        Args:
          slots: the most requests at a time.
          page_size, num_pages: of the cache.
          chunk: the most tokens of a prompt in a step.
          prefix: what prompts have in common at their beginning, or nothing.
          seed: of sampling.
        """
        self._params, self._config, self._end_id = params, config, end_id
        self._page_size, self._chunk, self._num_pages = page_size, chunk, num_pages
        dtype = params["embed"].dtype.name
        self._state = State.new(config, slots + 1, num_pages, page_size, dtype)
        self._slots: list[Request | None] = [None] * (slots + 1)
        self._waiting: collections.deque[Request] = collections.deque()
        self._share = jax.jit(serving.share_prefix, donate_argnums=0)
        self._free = jax.jit(serving.free, donate_argnums=0)
        self._key, self.steps, self.on_token = jax.random.key(seed), 0, lambda request: None
        self.on_token: Callable[[Request], object]
        self._prefix = list(prefix)
        self._reserved = [0] * (slots + 1)
        if self._prefix:
            self._reserved[0] = self._pages(len(self._prefix))
            self._slots[0] = Request(self._prefix, 0)
            while not self._slots[0].is_decoding:
                self.step()

    def add(self, request: Request) -> None:
        """Let a request wait its turn.

        Raises:
          InputError: it can never be answered: the prompt is empty, or too long for the model or
            the cache.
        """
        longest = len(request.prompt) + request.most
        room = (self._num_pages - self._reserved[0]) * self._page_size
        if not request.prompt or longest > min(self._config.context, room):
            raise InputError(
                f"a prompt of {len(request.prompt)} tokens and {request.most} new ones; there must "
                f"be one, and the model knows {self._config.context}, the cache {room} tokens"
            )
        self._waiting.append(request)

    def run(self) -> None:
        """Answer all requests."""
        while self._waiting or any(self._slots[1:]):
            self.step()

    def step(self) -> None:
        """One step of all sequences that are there."""
        self._let_in()
        tokens = [self._next_tokens(slot) for slot in range(len(self._slots))]
        longest = max(map(len, tokens))
        size = len(self._slots) if longest == 1 else len(self._slots) + self._chunk
        cu_seqlens = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        flat = np.zeros(size, np.int32)
        flat[: cu_seqlens[-1]] = [x for new in tokens for x in new]
        temperature = [x.temperature if x else 0.0 for x in self._slots]
        self._key, key = jax.random.split(self._key)
        following, self._state = step(
            self._params, self._state, jnp.asarray(flat), jnp.asarray(cu_seqlens),
            jnp.asarray(temperature, jnp.float32), key, self._config,
            longest=1 if longest == 1 else self._chunk, longest_cache=self._longest_cache(tokens),
        )  # fmt: skip
        self.steps += 1
        self._take(tokens, np.asarray(following))

    @property
    def free_pages(self) -> int:
        return int(self._state.tables.free_pages)

    def _let_in(self) -> None:
        for slot in range(1, len(self._slots)):
            if not self._waiting or self._slots[slot] is not None:
                continue
            request = self._waiting[0]
            shared = self._shared(request.prompt)
            needed = self._pages(len(request.prompt) + request.most) - shared // self._page_size
            if sum(self._reserved) + needed > self._num_pages:
                return
            self._slots[slot], self._reserved[slot] = self._waiting.popleft(), needed
            if shared:
                tables = self._share(self._state.tables, 0, slot, shared)
                self._state = dataclasses.replace(self._state, tables=tables)
                request.done = shared

    def _shared(self, prompt: list[int]) -> int:
        """How many tokens of a prompt are in the pages of slot 0; its last token never is."""
        pairs = zip(self._prefix, prompt[:-1], strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if same is None:
            same = min(len(self._prefix), len(prompt) - 1)
        return same // self._page_size * self._page_size

    def _next_tokens(self, slot: int) -> list[int]:
        """What a slot adds in this step: of prompts, that of the first slot that has one left."""
        request = self._slots[slot]
        if request is None:
            return []
        if request.is_decoding:
            return request.answer[-1:] if slot else []
        reading = (i for i, x in enumerate(self._slots) if x and not x.is_decoding)
        if slot != next(reading):
            return []
        return request.prompt[request.done : request.done + self._chunk]

    def _take(self, tokens: list[list[int]], following: np.ndarray) -> None:
        ended = np.zeros(len(self._slots), bool)
        for slot, request in enumerate(self._slots):
            if request is None or not tokens[slot]:
                continue
            if not request.is_decoding:
                request.done += len(tokens[slot])
            if slot == 0 or not request.is_decoding:
                continue
            is_end = int(following[slot]) == self._end_id
            if not is_end and request.most:
                request.answer.append(int(following[slot]))
                self.on_token(request)
            if is_end or len(request.answer) >= request.most:
                ended[slot], self._slots[slot], self._reserved[slot] = True, None, 0
        if ended.any():
            tables = self._free(self._state.tables, jnp.asarray(ended))
            self._state = dataclasses.replace(self._state, tables=tables)

    def _longest_cache(self, tokens: list[list[int]]) -> int:
        """The most tokens that a slot may have, as a power of two of pages: few are planned for."""
        lengths = [
            x.done + len(x.answer) + len(new)
            for x, new in zip(self._slots, tokens, strict=True)
            if x
        ]
        pages = self._pages(max(lengths, default=1))
        room = self._state.tables.table.shape[1]
        return min(1 << max(pages - 1, 0).bit_length(), room) * self._page_size

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
