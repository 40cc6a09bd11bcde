"""Wrong implementations of attention: the mistakes that the conformance suite must notice.

Each is a small function around the right implementation: the function calls it with other options
or other operands, or changes its results, and knows nothing of how XLA computes them. Where a
mistake is in the scores, or in which keys a query sees, the function computes those itself,
densely, and passes them as a bias or as a mask. Each group of mistakes is a module.
"""

import importlib

from tests.wrong_implementations.implementation import REGISTERED, Wrong

__all__ = ["WRONG", "Wrong"]

GROUPS = (
    "masks", "segments", "heads", "scores", "softmax", "dropout", "gradients", "mods", "rows",
    "layout", "serving",
)  # fmt: skip

for _group in GROUPS:
    importlib.import_module(f"{__name__}.{_group}")

WRONG: dict[str, Wrong] = REGISTERED
"""All wrong implementations by name, "group/mistake", in the order of the groups."""
