"""The values of lengths, segment ids and cu_seqlens, checked on the host where they are there.

A NumPy array, a list or a number is looked at, and so is a JAX array in a CPU's memory. Not looked
at are tracers, which have no values yet, and arrays in an accelerator's memory: reading them would
make every call wait for the device. What wrong values mean there is said in packing.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_LARGEST = np.iinfo(np.int32).max


def check_values(
    arrays: Mapping[str, Any],
    *,
    lengths: tuple[int, int],
    max_segments: int | None,
    max_seq_lens: tuple[int, int] | None,
) -> None:
    """Check the arguments of a call whose shapes are known to be right.

    Args:
      arrays: the arguments as given, by name; others may be among them.
      lengths: of the query and key arrays.
      max_segments, max_seq_lens: as in `AttentionOptions`.

    Raises:
      ValueError: with expected and got.
    """
    for i, (side, suffix) in enumerate((("query", "q"), ("key_value", "kv"))):
        row_lengths = arrays.get(f"{side}_seq_lengths")
        known = None if row_lengths is None else known_values(row_lengths)
        if known is not None:
            _check_lengths(f"{side}_seq_lengths", known, lengths[i])
        ids = known_values(arrays.get(f"{side}_segment_ids"))
        if ids is not None and (row_lengths is None or known is not None):
            # What stands past a length is padding, whatever it is.
            ends = np.full(ids.shape[:-1], lengths[i]) if known is None else known
            _check_ids(f"{side}_segment_ids", ids, ends.reshape(ids.shape[:-1]), max_segments)
        cu_seqlens = known_values(arrays.get(f"cu_seqlens_{suffix}"))
        if cu_seqlens is not None:
            longest = None if max_seq_lens is None else max_seq_lens[i]
            _check_cu_seqlens(suffix, cu_seqlens, lengths[i], longest)


def known_values(x: Any) -> np.ndarray | None:
    """The array as NumPy's, if looking at it makes nothing wait for an accelerator; else None."""
    if isinstance(x, jax.Array):
        return np.asarray(x) if _is_on_cpu(x) else None
    if x is None or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return None
    return np.asarray(x)


def _is_on_cpu(x: jax.Array) -> bool:
    if isinstance(x, Tracer) or not x.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in x.devices())


def _check_lengths(name: str, given: np.ndarray, length: int) -> None:
    wrong = given[(given < 0) | (given > length)]
    if wrong.size:
        raise ValueError(f"{name}: expected lengths from 0 to {length}, got {wrong[0]}")


def _check_ids(name: str, ids: np.ndarray, ends: np.ndarray, largest: int | None) -> None:
    places = np.arange(ids.shape[-1])
    ids = np.where(places < ends[..., None], ids, 0)
    if (ids < 0).any():
        raise ValueError(f"{name}: expected ids of 0 (padding) and above, got {ids.min()}")
    if (ids > _LARGEST).any():
        raise ValueError(f"{name}: expected ids below 2^31, got {ids.max()}")
    if largest is not None and (ids > largest).any():
        raise ValueError(f"{name}: expected ids up to max_segments={largest}, got {ids.max()}")
    highest = np.maximum.accumulate(ids, axis=-1)
    before = highest[..., :-1]
    later, earlier = ids[..., 1:], ids[..., :-1]
    descends = (later > 0) & (later < before)
    if descends.any():
        raise ValueError(
            f"{name}: expected ids ascending along the row, got {later[descends][0]} after "
            f"{before[descends][0]}"
        )
    comes_back = (later > 0) & (later == before) & (earlier == 0)
    if comes_back.any():
        raise ValueError(
            f"{name}: expected the places of an id to follow one another, got "
            f"{later[comes_back][0]} again after padding"
        )


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
