"""The order of the axes of the caller's arrays, which becomes the order of operands.py.

Axes that are swapped here are swapped back where a kernel reads them (cudnn/arrays.py), and XLA
drops both. So nothing is copied, and the options record the order in memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.static_arguments import KvLayout, QkvLayout
from attn_dispatch.choices import check_choice

Given = TypeVar("Given", ArrayLike, ArrayLike | None)

_ELSEWHERE = {
    "bshd": "BTNH", "bshdbshdbshd": "BTNH", "bsnh": "BTNH", "bthd": "BTNH",
    "bhsd": "BNTH", "bhsdbhsdbhsd": "BNTH", "bnsh": "BNTH", "bhtd": "BNTH",
}  # fmt: skip
"""By what other libraries say, the name of a layout here."""

_EQUAL = 1.0
"""Another order of the same letters is another layout: "sbhd" does not mean "bshd"."""

_AXES_OF_PAGES = "'NHD' is [P, page, K, H], 'HND' is [P, K, page, H]"
_OTHER_PAGES: dict[str, str] = dict.fromkeys(("ndh", "hdn", "dnh", "dhn"), _AXES_OF_PAGES)
"""Orders of the axes that no pool has, and what to say of them."""

_PACKED = re.compile(r"t[23]?hd", re.IGNORECASE)
_LEAST_DIMS = 3


def rows_first(arguments: Arguments) -> Arguments:
    """The arguments with query, key and value as [..., length, heads, dim], which None stands for.

    heads_first_q and heads_first_kv replace `qkv_layout`.

    Raises:
      ValueError: there is no such layout.
    """
    layout = arguments.qkv_layout
    if layout is None:
        return arguments
    choices = get_args(QkvLayout)
    if isinstance(layout, str) and _PACKED.match(layout):
        raise ValueError(
            f"qkv_layout: expected one of {choices}, got {layout!r}; packed sequences have segment "
            "ids with max_segments, or go to ragged_dot_product_attention"
        )
    if check_choice("qkv_layout", layout, choices, _ELSEWHERE, _EQUAL) == "BTNH":
        return arguments
    return replace(
        arguments,
        query=_swapped(arguments.query, _LEAST_DIMS),
        key=_swapped(arguments.key, _LEAST_DIMS),
        value=_swapped(arguments.value, _LEAST_DIMS),
        qkv_layout="BTNH",
        heads_first_q=True,
        heads_first_kv=True,
    )


def separate_pages(arguments: Arguments) -> Arguments:
    """The arguments of a paged call with separate pages [P, page, K, ·] of keys and of values.

    heads_first_kv replaces `kv_layout`. From one pool [P, 2, ...] of both, key_pages and
    value_pages become the same 2 · P pages, with the values of each page of keys in the page after
    it, and value_page becomes 1.

    Raises:
      ValueError: there is no such layout, or the pool has another shape.
    """
    layout: KvLayout = check_choice(
        "kv_layout", arguments.kv_layout, get_args(KvLayout), _OTHER_PAGES, _EQUAL
    )
    keys, values, value_page = arguments.key_pages, arguments.value_pages, 0
    if keys is not None and values is None:
        keys = _both_in_one(keys, layout)
        values, value_page = keys, 1
    if layout == "HND":
        is_one = values is keys
        keys = _swapped(keys, 4)
        values = keys if is_one else _swapped(values, 4)
    return replace(
        arguments,
        key_pages=keys,
        value_pages=values,
        value_page=value_page,
        kv_layout="NHD",
        heads_first_kv=layout == "HND",
    )


def _both_in_one(pool: ArrayLike, layout: KvLayout) -> jax.Array:
    """[P, 2, …] as [2 · P, …]."""
    pool = jnp.asarray(pool)
    if pool.ndim != 5 or pool.shape[1] != 2:
        axes = "[P, 2, page, K, H]" if layout == "NHD" else "[P, 2, K, page, H]"
        raise ValueError(
            f"value_pages: expected an array, or None where key_pages is a pool {axes} of both, "
            f"got None beside key_pages {list(pool.shape)}"
        )
    return pool.reshape(-1, *pool.shape[2:])


def _swapped(x: Given, least: int) -> Given | jax.Array:
    """x with length and heads swapped; unchanged if it has too few dims, which is refused later."""
    return x if x is None or jnp.ndim(x) < least else jnp.swapaxes(jnp.asarray(x), -3, -2)
