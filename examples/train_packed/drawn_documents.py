"""Random documents for the tests."""

from __future__ import annotations

import numpy as np

from .packing import Shape

SHAPE = Shape(rows=3, row_length=40, max_segments=5, max_documents=9)


def drawn(seed: int, count: int = 50, longest: int = SHAPE.row_length) -> list[np.ndarray]:
    """Documents whose lengths have a long tail. Each begins with its number, in two tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.0, 0.8, count), 3, longest).astype(int)
    documents = [rng.integers(1, 256, x).astype(np.uint8) for x in lengths]
    for i, x in enumerate(documents):
        x[:2] = i // 16, i % 16
    return documents
