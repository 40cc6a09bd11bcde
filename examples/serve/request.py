"""A request: a prompt, how to answer it, and the state of its answer."""

import dataclasses


@dataclasses.dataclass(eq=False)
class Request:
    prompt: list[int]
    most: int
    """The most tokens of the answer."""
    temperature: float = 0.0
    """0 takes the likeliest token every time."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to this."""
    seed: int = 0
    """Determines the answer, whatever other requests there are."""
    answer: list[int] = dataclasses.field(default_factory=list)
    done: int = 0
    """The number of the prompt's tokens that are in the cache or in a step that was sent."""
    coming: int = 0
    """The number of the answer's tokens in steps that were sent."""

    @property
    def is_decoding(self) -> bool:
        return self.done == len(self.prompt)

    @property
    def left(self) -> int:
        """How many more tokens the answer may get, not counting those in steps that were sent."""
        return self.most - len(self.answer) - self.coming
