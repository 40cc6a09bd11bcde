"""A step of training, as a function of parameters, optimizer state and rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .model import Config, Decoder
from .packing import NO_TARGET, Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The parts of training that do not change: the model's structure and the optimizer."""

    graph: Any
    optimizer: optax.GradientTransformation

    @classmethod
    def new(cls, config: Config, learning_rate: float, steps: int) -> "Trainer":
        model = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, learning_rate, min(100, steps // 3), steps, learning_rate / 10
        )
        adam = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        return cls(nnx.split(model)[0], optax.chain(optax.clip_by_global_norm(1.0), adam))

    def initial(self, config: Config, seed: int) -> State:
        params = nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(seed)), nnx.Param)[1])
        return State(params, self.optimizer.init(params))

    def loss(self, params: Any, rows: Rows, max_segments: int) -> jax.Array:
        """The mean cross entropy over all targets of the batch, whichever rows they are in."""
        logits = self.model(params)(rows, max_segments)
        wanted = jnp.maximum(rows.targets, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        is_target = rows.targets != NO_TARGET
        return jnp.where(is_target, losses, 0).sum() / is_target.sum()

    def model(self, params: Any) -> Decoder:
        return nnx.merge(self.graph, nnx.State(params))

    def step(self, max_segments: int, placement: State) -> jax.stages.Wrapped:
        """A jitted function from state and rows to the next state and the loss before the step.

        The memory of the state is reused. `placement` is a sharding for each array of the state.
        """

        def step(state: State, rows: Rows) -> tuple[State, jax.Array]:
            loss, grads = jax.value_and_grad(self.loss)(state.params, rows, max_segments)
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), optimizer), loss

        return jax.jit(step, donate_argnums=0, out_shardings=(placement, None))
