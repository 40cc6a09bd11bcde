"""The checks of the values of lengths, segment ids, cu_seqlens and windows, where they can be read.

NumPy arrays, lists, numbers and JAX arrays in a CPU's memory are read. Tracers have no values yet,
and reading arrays in an accelerator's memory would make every call wait for the device. Invalid
values there make NaN (semantics/invalid_values.py).

With ATTN_DISPATCH_CHECK=1 (`settings.Settings.check`) all are read: arrays of an accelerator at
once, traced ones by a callback from the running program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from attn_dispatch import settings
from attn_dispatch.call.static_arguments import wrong_window
from attn_dispatch.warning import Line, caller, warn_of_convention

_LARGEST = np.iinfo(np.int32).max

_SIDES = (("query", "q"), ("key_value", "kv"))

_CHECKED = (
    "query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids",
    "cu_seqlens_q", "cu_seqlens_kv", "local_window_size",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The limits of the values of a call."""

    lengths: tuple[int, int]
    """The lengths of the query and key arrays."""
    max_segments: int | None = None
    """The largest segment id, as in `Meaning`."""
    max_seq_lens: tuple[int, int] | None = None
    """The longest sequence of queries and of keys, as in `Meaning`."""


def check_values(arrays: Mapping[str, ArrayLike], limits: Limits) -> None:
    """Check the arguments of a call whose shapes are known to be right.

    Args:
      arrays: the arguments as given, by name; others may be among them. `local_window_size` is an
        array of both sides.

    Raises:
      ValueError: if a value is wrong; the message has what was expected and what was given. If
        traced values are checked, JAX raises its `JaxRuntimeError` with that text when the program
        runs.
    """
    given = {x: y for x, y in arrays.items() if x in _CHECKED and y is not None}
    known = {name: known_values(x) for name, x in given.items()}
    _check({name: x for name, x in known.items() if x is not None}, limits, given.keys())
    if not settings.current().check or all(x is not None for x in known.values()):
        return
    line = caller()  # while the program runs it would be another line

    def check(values: Mapping[str, ArrayLike]) -> None:
        _check({x: np.asarray(y) for x, y in values.items()}, limits, values.keys(), line)

    jax.debug.callback(check, {name: jnp.asarray(x) for name, x in given.items()})


def _check(
    known: Mapping[str, np.ndarray],
    limits: Limits,
    given: Collection[str],
    line: Line | None = None,
) -> None:
    """Check the known values of the arguments whose names are in `given`.

    `line` made the call; None for the current call.
    """
    for i, (side, suffix) in enumerate(_SIDES):
        row_lengths = known.get(f"{side}_seq_lengths")
        if row_lengths is not None:
            _check_lengths(f"{side}_seq_lengths", row_lengths, limits.lengths[i])
        ids = known.get(f"{side}_segment_ids")
        if ids is not None and (f"{side}_seq_lengths" not in given or row_lengths is not None):
            # Ids past a length are padding, whatever they are.
            ends = np.full(ids.shape[:-1], limits.lengths[i])
            if row_lengths is not None:
                ends = row_lengths.reshape(ids.shape[:-1])
            _check_ids(f"{side}_segment_ids", ids, ends, limits, i, line)
        cu_seqlens = known.get(f"cu_seqlens_{suffix}")
        if cu_seqlens is not None:
            longest = None if limits.max_seq_lens is None else limits.max_seq_lens[i]
            _check_cu_seqlens(suffix, cu_seqlens, limits.lengths[i], longest)
    window = known.get("local_window_size")
    if window is not None and (window < 0).any():
        raise wrong_window(window.min())


def known_values(x: ArrayLike | None) -> np.ndarray | None:
    """The values as a NumPy array, if they can be read without a wait; else None."""
    if isinstance(x, jax.Array):
        return np.asarray(x) if _is_readable(x) else None
    if x is None or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return None
    return np.asarray(x)


def _is_readable(x: jax.Array) -> bool:
    if isinstance(x, Tracer) or not x.is_fully_addressable:
        return False
    return settings.current().check or all(device.platform == "cpu" for device in x.devices())


def _check_lengths(name: str, given: np.ndarray, length: int) -> None:
    wrong = given[(given < 0) | (given > length)]
    if wrong.size:
        raise ValueError(f"{name}: expected lengths from 0 to {length}, got {wrong[0]}")


def _check_ids(
    name: str,
    given: np.ndarray,
    ends: np.ndarray,
    limits: Limits,
    side: int,
    line: Line | None,
) -> None:
    """Check ids [..., L] before the ends [...] of their rows."""
    is_inside = cast("np.ndarray", np.arange(given.shape[-1]) < ends[..., None])
    ids = np.where(is_inside, given, 0)
    if (ids < 0).any():
        raise ValueError(
            f"{name}: expected ids of 0 (padding) and above, got {ids.min()}; where -1 is padding "
            "add 1 to all ids"
        )
    if (ids > _LARGEST).any():
        raise ValueError(f"{name}: expected ids below 2^31, got {ids.max()}")
    largest = limits.max_segments
    if largest is None or ids.max(initial=0) < largest:
        _warn_if_from_0(name, ids, line)  # otherwise ids plus 1 would be too large
    if largest is None:
        return  # ids are only compared for equality
    if (ids > largest).any():
        raise ValueError(f"{name}: expected ids up to max_segments={largest}, got {ids.max()}")
    _check_order(name, ids)
    if limits.max_seq_lens is not None:
        longest = limits.max_seq_lens[side]
        counts = [np.bincount(row[row > 0]) for row in ids.reshape(-1, ids.shape[-1])]
        most = max((int(x.max(initial=0)) for x in counts), default=0)
        if most > longest:
            raise ValueError(
                f"{name}: expected no segment longer than max_segment_len={longest}, got one of "
                f"{most}"
            )


_ANY_ORDER = "; without max_segments ids may stand in any order, which kernels run as a mask"


def _check_order(name: str, ids: np.ndarray) -> None:
    highest = np.maximum.accumulate(ids, axis=-1)
    before = highest[..., :-1]
    later, earlier = ids[..., 1:], ids[..., :-1]
    descends = (later > 0) & (later < before)
    if descends.any():
        raise ValueError(
            f"{name}: expected ids ascending along the row with max_segments, got "
            f"{later[descends][0]} after {before[descends][0]}{_ANY_ORDER}"
        )
    comes_back = (later > 0) & (later == before) & (earlier == 0)
    if comes_back.any():
        raise ValueError(
            f"{name}: expected the places of an id to follow one another with max_segments, got "
            f"{later[comes_back][0]} again after padding{_ANY_ORDER}"
        )


def _warn_if_from_0(name: str, ids: np.ndarray, line: Line | None) -> None:
    """Warn if every row of the ids [..., L] begins with 0."""
    if ids.size and (ids[..., 0] == 0).all():
        warn_of_convention(
            f"{name}: every row begins with id 0, which is padding and attends nothing. Where ids "
            "count from 0 add 1 to them",
            line,
        )


def check_cu_seqlens_q(given: ArrayLike, tokens: int, longest: int) -> None:
    """Check cu_seqlens_q of a paged call's queries [tokens, N, H], if it can be read."""
    known = known_values(given)
    if known is not None:
        _check_cu_seqlens("q", known, tokens, longest)


def check_pages(
    arrays: Mapping[str, ArrayLike], pages: int, page_size: int, queries: int, left: int | None
) -> None:
    """Check the entries of a page table [B, M] that queries need, if they can be read.

    Args:
      arrays: the arguments as given, by name.
      pages, page_size: the number of pages, and of keys in each.
      queries: T.
      left: the least number of keys that the window reaches to the left; None if it is open.

    Raises:
      ValueError: an entry is not the number of a page.
    """
    table, lengths = (known_values(arrays[x]) for x in ("page_table", "key_value_seq_lengths"))
    if table is None or lengths is None:
        return
    begins = cast("np.ndarray", page_size * np.arange(table.shape[1]))
    ends, reach = lengths.reshape(-1, 1), ""
    is_read = begins < ends
    if left is not None:
        number = known_values(arrays.get("query_seq_lengths"))
        if number is None:
            # A traced number may be 0.
            number = np.array(queries if arrays.get("query_seq_lengths") is None else 0)
        is_read &= begins + page_size > ends - left - number.reshape(-1, 1)
        reach = " and the window"
    wrong = table[is_read & ((table < 0) | (table >= pages))]
    if wrong.size:
        raise ValueError(
            f"page_table: expected pages from 0 to {pages - 1} as far as key_value_seq_lengths"
            f"{reach} reach, got {wrong[0]}"
        )


def as_int32(x: jax.Array) -> jax.Array:
    """x as int32; numbers out of its range become the nearest in range."""
    if jnp.iinfo(x.dtype).max > _LARGEST:
        least = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -_LARGEST
        x = jnp.clip(x, jnp.array(least, x.dtype), jnp.array(_LARGEST, x.dtype))
    return x.astype(jnp.int32)


def _check_cu_seqlens(suffix: str, given: np.ndarray, length: int, longest: int | None) -> None:
    name = f"cu_seqlens_{suffix}"
    if given[0] != 0:
        raise ValueError(f"{name}: expected 0 first, got {given[0]}")
    steps = np.diff(given.astype(np.int64))
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        raise ValueError(
            f"{name}: expected ascending values, got {given[at + 1]} after {given[at]}"
        )
    if given[-1] > length:
        raise ValueError(f"{name}: expected values up to {length}, got {given[-1]}")
    if longest is not None and (steps > longest).any():
        raise ValueError(
            f"{name}: expected no sequence longer than max_seqlen_{suffix}={longest}, got one of "
            f"{steps.max()}"
        )
