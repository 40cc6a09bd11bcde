"""One training step on made-up tokens, to check on a machine without a GPU which kernels run it:

attn-dispatch explain-program examples.finetune.kernels:training_step --target h100 --check
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..smollm2.random_weights import SMOLLM2_135M, drawn
from ..train_packed.packing import Rows
from .__main__ import GPU
from .model import packed_loss


def training_step() -> Any:
    """The loss and the gradients, to be traced: it draws its weights, and its rows are empty."""
    zeros = jnp.zeros((GPU.shape.rows, GPU.shape.row_length), jnp.int32)
    rows, params = Rows(zeros, zeros, zeros, zeros), drawn(SMOLLM2_135M, "float32")

    def loss(params: Any) -> jax.Array:
        total, _ = packed_loss(params, rows, SMOLLM2_135M, GPU.shape.max_segments, GPU.dtype)
        return total

    return jax.value_and_grad(loss)(params)
