"""A prompt, how it is to be answered, and what became of it."""

import dataclasses


@dataclasses.dataclass(eq=False)
class Request:
    prompt: list[int]
    most: int
    """The most tokens of the answer."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together."""
    seed: int = 0
    """The same one draws the same answer, whatever else is being answered."""
    answer: list[int] = dataclasses.field(default_factory=list)
    done: int = 0
    """Tokens of the prompt that are in the cache, or on their way."""
    coming: int = 0
    """Tokens of the answer that are on their way."""

    @property
    def is_decoding(self) -> bool:
        return self.done == len(self.prompt)

    @property
    def left(self) -> int:
        """How many more tokens there may be than those that are there or on their way."""
        return self.most - len(self.answer) - self.coming
