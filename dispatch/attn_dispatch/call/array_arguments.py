"""The checks of arrays other than query, key and value, which get the shapes of operands.py.

They have the leading dims of query, with size 1 where they are shared along a dim (leading.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.shapes import CallShape, hint_if, hint_if_swapped
from attn_dispatch.call.values import as_int32


def operand(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """The operand from the array that was given as the argument of this name.

    Raises:
      ValueError: if it does not fit the call; the message has what was expected and what was
        given.
    """
    if name in ("bias", "mask"):
        return _score_shaped(name, x, shape)
    if name in ("query_seq_lengths", "key_value_seq_lengths"):
        return _lengths(name, x, shape)
    if name in ("query_segment_ids", "key_value_segment_ids"):
        return _segment_ids(name, x, shape)
    if name in ("alibi_slopes", "sinks"):
        return _per_head(name, x, shape)
    if name in ("key_pages", "value_pages"):
        return shape.shared(x)
    return x


def _score_shaped(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """bias or mask as [..., 1|N, 1|T, 1|S]; lower ranks extend to the left, as in numpy."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"mask: expected dtype bool (True = attend), got {x.dtype.name}; for 0 and 1 "
            "pass mask != 0, and for numbers that are added to scores pass bias"
        )
    if name == "bias" and not floating:
        hint = "; a mask is passed as mask=" if x.dtype == jnp.bool_ else "; pass float32"
        raise ValueError(f"bias: expected a floating dtype, got {x.dtype.name}{hint}")
    full = (*shape.leading, shape.num_heads, shape.seq_len_q, shape.seq_len_kv)
    rank = max(len(full), 4)
    full = (1,) * (rank - len(full)) + full
    if x.ndim > rank or any(
        got not in (1, expected) for got, expected in zip(x.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [batch, heads, queries, keys] "
            f"{list(full)}, got {list(x.shape)}"
            + (_of_batch_and_keys(name, x, full) or hint_if_swapped(shape, x.shape))
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    return x if shape.leading else x[0]


def _of_batch_and_keys(name: str, x: jax.Array, full: tuple[int, ...]) -> str:
    if x.shape == (full[-4], *full[-2:]):
        return f"; of [batch, queries, keys] pass {name}[:, None]"
    if x.shape != (full[-4], full[-1]):
        return ""
    return f"; of [batch, keys] pass {name}[:, None, None, :]"


def _lengths(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[...] int32."""
    _check_integer(name, x)
    allowed = [shape.leading] if shape.leading else [(), (1,)]
    if x.shape not in allowed:
        is_mask = x.shape[:-1] == shape.leading and x.ndim > 0
        hint = "; of a mask that is 1 before the padding, pass its sum over the last axis" * is_mask
        raise ValueError(
            f"{name}: expected the batch dims {list(allowed[-1])}, got {list(x.shape)}{hint}"
        )
    return as_int32(x.reshape(shape.leading))


def _segment_ids(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[..., T] or [..., S] int32."""
    _check_integer(name, x)
    is_query = name.startswith("query")
    length = shape.seq_len_q if is_query else shape.seq_len_kv
    if x.shape != (*shape.leading, length):
        heads = shape.num_heads if is_query else shape.num_kv_heads
        raise ValueError(
            f"{name}: expected shape {[*shape.leading, length]}, got {list(x.shape)}"
            + hint_if(x.shape == (*shape.leading, heads), shape)
        )
    ids, most = as_int32(x), jnp.iinfo(jnp.int32).max
    # An id that int32 cannot hold becomes an invalid one, not the largest int32.
    return jnp.where(x > most, -1, ids) if jnp.iinfo(x.dtype).max > most else ids


def cu_seqlens(name: str, x: jax.Array, expected: tuple[int, ...]) -> jax.Array:
    """[M + 1] int32."""
    _check_integer(name, x)
    if x.ndim != 1 or x.shape[0] < 2:
        raise ValueError(
            f"{name}: expected shape [sequences + 1] for one sequence or more, got {list(x.shape)}"
        )
    if x.shape != expected:
        raise ValueError(
            f"{name}: expected cu_seqlens_q's shape {list(expected)}, got {list(x.shape)}"
        )
    return as_int32(x)


def _check_integer(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        hint = "" if x.dtype == jnp.bool_ else "; pass whole numbers as int32"
        raise ValueError(f"{name}: expected an integer dtype, got {x.dtype.name}{hint}")


def _per_head(name: str, x: jax.Array, shape: CallShape) -> jax.Array:
    """[..., N]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating dtype, got {x.dtype.name}; pass float32")
    shapes = dict.fromkeys([(shape.num_heads,), (*shape.leading, shape.num_heads)])
    if x.shape not in shapes:
        expected = " or ".join(str(list(x)) for x in shapes)
        hint = hint_if(x.shape[-1:] == (shape.seq_len_q,), shape)
        raise ValueError(f"{name}: expected shape {expected}, got {list(x.shape)}{hint}")
    return x if x.ndim > 1 else shape.shared(x)


def key_data(key: jax.Array) -> tuple[jax.Array, str]:
    """The words of the key, [words] uint32, and the name of its PRNG."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        impl, data = str(jax.random.key_impl(key)), jax.random.key_data(key)
    elif key.dtype == jnp.uint32 and key.ndim == 1:
        try:  # a raw key counts as one of JAX's default PRNG, as it does in jax.random
            impl, data = str(jax.random.key_impl(key)), key
        except TypeError as error:
            raise ValueError(
                "dropout_key: expected the words of a key of JAX's default PRNG, got "
                f"{key.shape[0]} words"
            ) from error
    else:
        is_seed = not key.ndim and jnp.issubdtype(key.dtype, jnp.integer)
        hint = "; from a seed, such as a step's number, jax.random.key(seed) makes one"
        raise ValueError(
            f"dropout_key: expected a single JAX PRNG key, got {key.dtype.name}{list(key.shape)}"
            + hint * is_seed
        )
    if data.ndim != 1:
        raise ValueError(
            f"dropout_key: expected a single key, got keys of shape {key.shape}; pass one of them: "
            "it draws another mask for each batch row and head"
        )
    return data, impl
