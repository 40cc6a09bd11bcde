"""Which requests are let in, and the slots and pages that they have.

A request is let in when there are pages for all that it may become, so that none runs out. Slot 0
holds what all prompts begin with: its full pages are shared.
"""

import collections
from collections.abc import Sequence

import numpy as np

from .request import Request


class Admission:
    def __init__(self, slots: int, page_size: int, num_pages: int, prefix: Sequence[int]):
        self.slots: list[Request | None] = [None] * (slots + 1)
        self.waiting: collections.deque[Request] = collections.deque()
        self.ended = np.zeros(slots + 1, bool)
        """Slots whose sequences are to be freed before the next step."""
        self.page_size, self._num_pages = page_size, num_pages
        self._prefix, self._reserved = list(prefix), [0] * (slots + 1)
        if prefix:
            self._reserved[0] = self.pages(len(prefix))
            self.slots[0] = Request(self._prefix, 0)

    @property
    def room(self) -> int:
        """The most tokens of a request."""
        return (self._num_pages - self._reserved[0]) * self.page_size

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not any(self.slots[1:])

    def let_in(self) -> list[tuple[int, int]]:
        """Who has waited longest gets the free slots, as long as there are pages.

        Returns:
          Of each slot that begins with pages of slot 0: it, and how many tokens they hold.
        """
        shared = []
        for slot in range(1, len(self.slots)):
            if not self.waiting or self.slots[slot] is not None:
                continue
            request = self.waiting[0]
            number = self._shared(request.prompt)
            needed = self._needed(request) - number // self.page_size
            if sum(self._reserved) + needed > self._num_pages:
                break
            self.slots[slot], self._reserved[slot] = self.waiting.popleft(), needed
            if number:
                request.done = number
                shared.append((slot, number))
                self.ended[slot] = False  # to share ends what was there
        return shared

    def end(self, slot: int) -> None:
        self.slots[slot], self._reserved[slot], self.ended[slot] = None, 0, True

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _needed(self, request: Request) -> int:
        return self.pages(len(request.prompt) + request.most)

    def _shared(self, prompt: list[int]) -> int:
        """How many tokens of a prompt are in the pages of slot 0; its last token never is."""
        pairs = zip(self._prefix, prompt[:-1], strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if same is None:
            same = min(len(self._prefix), len(prompt) - 1)
        return same // self.page_size * self.page_size
