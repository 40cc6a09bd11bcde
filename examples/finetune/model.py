"""SmolLM2 on packed rows: the layers of examples/smollm2, with segment ids and positions."""

import jax
import jax.numpy as jnp
import optax

from attn_dispatch import dot_product_attention

from ..smollm2.model import Config, Params, finish, logits_of, project, rotary_angles
from ..train_packed.packing import NO_TARGET, Rows


def packed_logits(params: Params, rows: Rows, config: Config, max_segments: int) -> jax.Array:
    """float32 [B, T, V]."""
    rotary = rotary_angles(jnp.asarray(rows.positions), config)

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        query, key, value = project(x, weights, rotary, config)
        attended = dot_product_attention(
            query, key, value, is_causal=True, query_segment_ids=rows.segment_ids,
            max_segments=max_segments,
        )  # fmt: skip
        return finish(x, attended, weights, config), None

    # For the backward pass only attention's results are saved: docs/packing.md.
    policy = jax.checkpoint_policies.save_only_these_names("context")
    x = params["embed"][rows.tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params["layers"])
    return logits_of(x, params, config)


def packed_loss(
    params: Params, rows: Rows, config: Config, max_segments: int, dtype: str
) -> tuple[jax.Array, jax.Array]:
    """The summed cross entropy of all targets, computed in `dtype`, and the number of targets."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    logits = packed_logits(params, rows, config, max_segments)
    is_target = rows.targets != NO_TARGET
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(rows.targets, 0))
    return jnp.where(is_target, losses, 0).sum(), is_target.sum()
