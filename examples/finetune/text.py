"""The text: Python's reference manual, which comes with every Python, one document per topic.

Topics have 200 to 20,000 characters. Every eighth is held out, so that the loss on it does not
measure memorization.
"""

import dataclasses
import pydoc_data.topics
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents of token ids, int32."""

    trained: list[np.ndarray]
    held_out: list[np.ndarray]


def manual(encode: Callable[[str], list[int]], longest: int) -> Text:
    """The topics of the manual, cut into documents of at most `longest` tokens."""
    topics = pydoc_data.topics.topics
    text = Text([], [])
    for i, name in enumerate(sorted(topics)):
        ids = np.asarray(encode(topics[name]), np.int32)
        pieces = [ids[at : at + longest] for at in range(0, len(ids), longest)]
        (text.held_out if i % 8 == 7 else text.trained).extend(x for x in pieces if len(x) > 1)
    return text
