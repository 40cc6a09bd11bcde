"""Steps of AdamW over all weights, and the loss on a text."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from ..smollm2.model import Config, Params
from ..train_packed.packing import Rows, Shape, batches, packed
from .model import packed_loss


@dataclasses.dataclass(frozen=True)
class Settings:
    shape: Shape
    dtype: str
    steps: int
    evaluated: int
    """The number of batches on which the loss is measured."""
    learning_rate: float = 5e-5


def loss_on(
    documents: Sequence[np.ndarray], params: Params, config: Config, settings: Settings
) -> float:
    """The loss in nats per token over the first batches of `documents`, always the same ones."""
    total = count = 0.0
    stream = batches(documents, settings.shape, seed=0)
    for batch in itertools.islice(stream, settings.evaluated):
        loss, number = _evaluate(
            params, packed(batch, settings.shape), config, settings.shape.max_segments,
            settings.dtype,
        )  # fmt: skip
        total, count = total + float(loss), count + int(number)
    return total / count


_evaluate = jax.jit(packed_loss, static_argnums=(2, 3, 4))


def finetune(
    documents: Sequence[np.ndarray], params: Params, config: Config, settings: Settings,
    on_step: Callable[[float, int], object] = lambda loss, tokens: None,
) -> tuple[Params, list[float]]:  # fmt: skip
    """Train float32 `params`, whose memory is reused. Returns the new ones and each step's loss."""
    schedule = optax.linear_schedule(settings.learning_rate, 0.0, settings.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, rows: Rows) -> tuple[Any, Any, Any]:
        def mean(params: Params) -> jax.Array:
            total, count = packed_loss(
                params, rows, config, settings.shape.max_segments, settings.dtype
            )
            return total / count

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    stream = batches(documents, settings.shape, seed=1)
    for batch in itertools.islice(stream, settings.steps):
        params, state, loss = step(params, state, packed(batch, settings.shape))
        losses.append(float(loss))
        on_step(losses[-1], batch.tokens)
    return params, losses
