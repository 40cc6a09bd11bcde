"""Three sizes of model and batch: for tests, for a CPU, and for a GPU."""

import dataclasses

from .documents import VOCABULARY
from .model import Config
from .packing import Shape


@dataclasses.dataclass(frozen=True)
class Size:
    config: Config
    shape: Shape
    steps: int
    learning_rate: float
    files: int | None = None
    """The number of source files from which documents are taken; None for all."""


SIZES = {
    "tiny": Size(
        Config(
            layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn_width=128,
            vocabulary=VOCABULARY,
        ),
        Shape(rows=4, row_length=256, max_segments=16, max_documents=8),
        steps=20, learning_rate=3e-3, files=20,
    ),
    "small": Size(
        Config(
            layers=4, width=128, heads=8, kv_heads=2, head_dim=16, ffn_width=384,
            vocabulary=VOCABULARY,
        ),
        Shape(rows=2, row_length=1024, max_segments=32, max_documents=5),
        steps=60, learning_rate=3e-3,
    ),
    "large": Size(  # 271 million parameters
        Config(
            layers=24, width=1024, heads=8, kv_heads=2, head_dim=128, ffn_width=2816,
            vocabulary=VOCABULARY, dtype="bfloat16",
        ),
        Shape(rows=4, row_length=8192, max_segments=64, max_documents=24),
        steps=60, learning_rate=3e-4,
    ),
}  # fmt: skip
"""max_documents is about the number of documents that the packed rows hold, so that padded batches
have few empty rows."""
