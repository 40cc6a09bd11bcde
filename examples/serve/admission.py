"""Admits requests, and gives them slots and pages.

A request is admitted when there are pages for its longest answer, so that none runs out of pages.
The prefix that all prompts share has the last slot, whose full pages are shared.
"""

import collections
from collections.abc import Sequence

import numpy as np

from .request import Request


class Admission:
    """The queue of requests, and the slots and pages of admitted ones."""

    def __init__(self, slots: int, page_size: int, num_pages: int, prefix: Sequence[int]):
        self.waiting: collections.deque[Request] = collections.deque()
        self.page_size, self._num_pages = page_size, num_pages
        self._prefix = list(prefix)
        self.prefix_slot = slots if prefix else None
        number = slots + bool(prefix)
        self.slots: list[Request | None] = [None] * number
        self.ended = np.zeros(number, bool)
        """Slots whose sequences must be freed before the next step."""
        self._reserved, self._turns = [0] * number, [0] * number
        if prefix:
            self._reserved[slots] = self.pages(len(prefix))
            self.slots[slots] = Request(self._prefix, 0)

    @property
    def room(self) -> int:
        """The most tokens that a request may have."""
        prefix_pages = 0 if self.prefix_slot is None else self._reserved[self.prefix_slot]
        return (self._num_pages - prefix_pages) * self.page_size

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not any(self.slots[: self.prefix_slot])

    @property
    def reading(self) -> list[int]:
        """The slots whose prompts are not completely read yet, in the order of admission."""
        slots = [i for i, x in enumerate(self.slots) if x and not x.is_decoding]
        return sorted(slots, key=lambda i: self._turns[i])

    def admit(self) -> list[tuple[int, int]]:
        """Give free slots to the requests that have waited longest, as far as there are pages.

        Returns:
          Each slot that begins with pages of the prefix, and the number of tokens in them.
        """
        shared = []
        for slot in range(len(self.slots)):
            if not self.waiting or self.slots[slot] is not None:
                continue
            request = self.waiting[0]
            number = self._shared(request.prompt)
            needed = self._needed(request) - number // self.page_size
            if sum(self._reserved) + needed > self._num_pages:
                break
            self.slots[slot], self._reserved[slot] = self.waiting.popleft(), needed
            self._turns[slot] = max(self._turns) + 1
            if number:
                request.done = number
                shared.append((slot, number))
                self.ended[slot] = False  # sharing the prefix ends the slot's last sequence
        return shared

    def end(self, slot: int) -> None:
        """Make a slot and its pages free for another request."""
        self.slots[slot], self._reserved[slot], self.ended[slot] = None, 0, True

    def pages(self, tokens: int) -> int:
        """The number of pages for a number of tokens."""
        return -(-tokens // self.page_size)

    def _needed(self, request: Request) -> int:
        return self.pages(len(request.prompt) + request.most)

    def _shared(self, prompt: list[int]) -> int:
        """The number of a prompt's tokens in full pages of the prefix, without its last token."""
        pairs = zip(self._prefix, prompt[:-1], strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if same is None:
            same = min(len(self._prefix), len(prompt) - 1)
        return same // self.page_size * self.page_size
