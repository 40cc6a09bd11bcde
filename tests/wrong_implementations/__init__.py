"""Wrong implementations of attention: the mistakes that the conformance suite must notice.

Each is a small function around the right implementation: it calls that with other options or other
operands, or changes what that returns, and knows nothing of how XLA computes it. Where a mistake is
in the scores, or in who may attend, the function computes those itself, densely, and hands them in
as a bias or as a mask. Each group of mistakes is a module.
"""

import importlib

from tests.wrong_implementations.implementation import ENTERED, Wrong

__all__ = ["WRONG", "Wrong"]

GROUPS = (
    "masks", "segments", "heads", "scores", "softmax", "dropout", "gradients", "mods", "rows",
    "layout", "serving",
)  # fmt: skip

for _group in GROUPS:
    importlib.import_module(f"{__name__}.{_group}")

WRONG: dict[str, Wrong] = ENTERED
"""All wrong implementations by "group/what is wrong", group by group."""
