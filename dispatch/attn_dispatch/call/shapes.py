"""The shapes and dtypes of queries, keys and values, and their checks against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

PAGED = ("query", "key_pages", "value_pages", "page_table")
"""The arrays that every paged call has."""


@dataclass(frozen=True)
class CallShape:
    leading: tuple[int, ...]
    seq_len_q: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    heads_first: bool = False
    """Whether the caller's arrays are [..., heads, length, dim]."""

    @property
    def axes(self) -> str:
        """The order of the axes of the caller's arrays and the way to the other, for messages."""
        return _AXES[self.heads_first] + "; " + _OTHER_ORDER[self.heads_first]

    def times(self, devices: int) -> CallShape:
        """The shape with the rows and keys of so many devices."""
        if devices == 1:
            return self
        rows, keys = self.seq_len_q * devices, self.seq_len_kv * devices
        return replace(self, seq_len_q=rows, seq_len_kv=keys)

    def shared(self, x: jax.Array) -> jax.Array:
        """x with leading dims of 1."""
        return x.reshape((1,) * len(self.leading) + x.shape)


def check_qkv(
    query: jax.Array, key: jax.Array, value: jax.Array, *, heads_first: bool = False
) -> CallShape:
    """The shape of a call with arrays [..., length, heads, dim]; see `CallShape.heads_first`."""
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(
                f"{name}: expected at least 3 dims [..., length, heads, dim], got {list(x.shape)}"
            )
    _check_dtypes(arrays)
    *leading, t, n, h = query.shape
    *key_leading, s, k, key_h = key.shape
    if not isinstance(h, int):
        raise ValueError(f"query: expected a head dim that is known, got the symbol {h}")
    if key_leading != leading:
        whole = f"(key, {(*leading, s, k, key_h)})".replace("'", "")
        repeated = f"; to use it in each batch row, pass jnp.broadcast_to{whole}"
        raise ValueError(
            f"key: expected query's batch dims {leading}, got {key_leading}"
            + repeated * ({*key_leading} <= {1} and len(key_leading) <= len(leading))
        )
    if key_h != h:
        hint = "; pass arrays with equal last dims (only value's may differ)"
        raise ValueError(f"key: expected query's head dim {h}, got {key_h}{hint}")
    if list(value.shape[:-1]) != [*leading, s, k]:
        raise ValueError(
            f"value: expected key's batch dims, length and heads {[*leading, s, k]}, "
            f"got {list(value.shape[:-1])}; pass a value for each key (the last dim may differ)"
        )
    hint = _swapped_hint(heads_first) if _fits_swapped(t, s, n, k) else ""
    _check_heads(n, "key", k, _AXES[heads_first], hint)
    return CallShape(tuple(leading), t, s, n, k, h, heads_first)


def check_paged(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, page_table: jax.Array
) -> CallShape:
    """The shape of a paged call: query [B, T, N, H], pages [P, page, K, ·], table [B, M]."""
    arrays = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    axes = {"query": "[B, T, N, H]", "key_pages": "[P, page, K, H]"}
    axes["value_pages"] = "[P, page, K, V]"
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(f"{name}: expected {axes[name]}, got {list(x.shape)}")
    _check_dtypes(arrays)
    b, t, n, h = query.shape
    p, page, k, key_h = key_pages.shape
    if key_h != h:
        raise ValueError(f"key_pages: expected query's head dim {h}, got {key_h}")
    if value_pages.shape[:-1] != (p, page, k):
        raise ValueError(
            f"value_pages: expected key_pages' number of pages, page size and heads {[p, page, k]}"
            f", got {list(value_pages.shape[:-1])}"
        )
    axes = 'pages are [P, page, K, H], with the heads after the keys, or kv_layout="HND"'
    _check_heads(n, "key_pages", k, axes)
    if not jnp.issubdtype(page_table.dtype, jnp.integer):
        raise ValueError(f"page_table: expected integers, got {page_table.dtype.name}")
    if page_table.ndim != 2 or page_table.shape[0] != b:
        raise ValueError(
            f"page_table: expected [B, pages of a sequence] with query's B {b}, got "
            f"{list(page_table.shape)}"
        )
    return CallShape((b,), t, page_table.shape[1] * page, n, k, h)


def _check_dtypes(arrays: Mapping[str, jax.Array]) -> None:
    """Check that all three have one floating dtype; a message names the one that differs."""
    query, key, value = arrays
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            cast = "" if x.dtype == jnp.bool_ else _cast(name, x.dtype, query)
            hint = cast or "; pass bfloat16, float16 or float32"
            raise ValueError(f"{name}: expected a floating dtype, got {x.dtype.name}{hint}")
    types = {name: x.dtype for name, x in arrays.items()}
    is_query_alone = types[query] != types[key] == types[value]
    if is_query_alone and types[key].itemsize > 1:
        wanted, of, like = types[key], f"{key}'s and {value}'s", key
    else:
        wanted, of, like = types[query], f"{query}'s", query
    for name, dtype in types.items():
        if dtype != wanted:
            raise ValueError(
                f"{name}: expected {of} dtype {wanted.name}, got {dtype.name}"
                + _cast(name, dtype, like)
            )


def _cast(name: str, dtype: np.dtype, like: str) -> str:
    """How to cast an array, as the end of a message; 8 bits may be quantized numbers."""
    if name == like or not (dtype.itemsize == 1 or jnp.issubdtype(dtype, jnp.floating)):
        return ""
    scaled = ", multiplied by its scale if it has one" if dtype.itemsize == 1 else ""
    return f"; pass {name}.astype({like}.dtype){scaled}"


def hint_if_swapped(shape: CallShape, scores: tuple[int, ...]) -> str:
    """A hint, if the shape of a mask or bias fits query and key with heads and length swapped."""
    full = (*shape.leading, shape.seq_len_q, shape.num_heads, shape.num_kv_heads)
    pairs = list(zip(scores[::-1], full[::-1], strict=False))
    fits = len(scores) <= len(full) and all(x in (1, y) for x, y in pairs)
    return _swapped_hint(shape.heads_first) if fits and sum(x != 1 for x in scores) > 1 else ""


def hint_if(is_swapped: bool, shape: CallShape) -> str:
    """A hint, if an array would fit query and key with heads and length swapped."""
    return _swapped_hint(shape.heads_first) if is_swapped else ""


def _fits_swapped(t: int, s: int, n: int, k: int) -> bool:
    """Whether t and s would fit as numbers of heads, with n and k as larger lengths."""
    return all(isinstance(x, int) for x in (t, s, n, k)) and 0 < s <= t < n and s < k and t % s == 0


_AXES = ("arrays are [batch, length, heads, dim]", "arrays are [batch, heads, length, dim]")
_OTHER_ORDER = (
    'for [batch, heads, length, dim] pass qkv_layout="BNTH"',
    "for [batch, length, heads, dim] leave out qkv_layout",
)
"""How to choose the other order, without and with heads first."""


def _swapped_hint(heads_first: bool) -> str:
    return f"; these look swapped: {_OTHER_ORDER[heads_first]}"


def _check_heads(query_heads: int, keys: str, kv_heads: int, axes: str, hint: str = "") -> None:
    if (query_heads % kv_heads if kv_heads else query_heads) != 0:
        raise ValueError(
            f"query: expected the number of heads to be a multiple of {kv_heads}, the heads of "
            f"{keys}, got {query_heads} ({axes}){hint}"
        )
