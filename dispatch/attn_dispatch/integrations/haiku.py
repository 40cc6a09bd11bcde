"""Haiku: `MultiHeadAttention` computed by attn_dispatch, with the parameters of Haiku's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack, cast

import haiku as hk
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.keywords import LayerOptions
from attn_dispatch.integrations.layers import as_bool, check_options
from attn_dispatch.warning import skip_frames_of

skip_frames_of(hk.__file__)


class _Options(LayerOptions, total=False):
    bias: ArrayLike | None
    scale: ArrayLike | None
    is_causal: bool
    dropout_rate: float
    dropout_key: ArrayLike | None


class MultiHeadAttention(hk.MultiHeadAttention):
    """`haiku.MultiHeadAttention`: the same arguments, parameters and names."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        **options: Unpack[_Options],
    ) -> jax.Array:
        """Attend.

        Args:
          query: [..., T, D_q].
          key: [..., S, D_k].
          value: [..., S, D_v].
          mask: [..., 1 or N, T, S], attend where it is not 0.
          options: further arguments of `attn_dispatch.dot_product_attention`, such as is_causal, or
            dropout_rate with dropout_key=hk.next_rng_key(), which Haiku's layer lacks.

        Returns:
          [..., T, model_size].

        Raises:
          ValueError: shapes do not match, or options ask for further results.
        """
        check_options(options)
        options["qkv_layout"] = "BTNH"
        if mask is not None and jnp.ndim(mask) != jnp.ndim(query) + 1:
            raise ValueError(
                f"mask: expected {jnp.ndim(query) + 1} dims [..., heads, queries, keys], got "
                f"{list(jnp.shape(mask))}"
            )
        project = cast("Callable[..., jax.Array]", self._linear_projection)
        heads = (
            project(query, self.key_size, "query"),
            project(key, self.key_size, "key"),
            project(value, self.value_size, "value"),
        )
        dtype = jnp.result_type(*heads)
        q, k, v = (x.astype(dtype) for x in heads)
        out = dot_product_attention(
            q,
            k,
            v,
            mask=None if mask is None else as_bool(mask),
            **options,
        )
        linear = hk.Linear(
            self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
        )
        return linear(out.reshape(*out.shape[:-2], -1))
