"""Packed documents in an order in which all devices have equal work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.core import Tracer

from attn_dispatch.call.static_arguments import check_positive_int


@dataclass(frozen=True, eq=False)
class Balance:
    """Which tokens each device holds. `reorder`, `restore` and `positions` take it as `order`."""

    tokens: np.ndarray
    """int32 [T] or [B, T]: the tokens in the order in which the devices hold them."""
    parts: int
    """The number of devices."""


def balance(segment_ids: object, parts: int) -> Balance:
    """Give each device an equal share of each packed document, an early and a late one.

    A document has 2 · parts equal chunks, of which device r holds chunks r and 2 · parts - 1 - r,
    next to each other. So each device has equally much work in every step of a ring, whatever the
    lengths. Calls in that order have `sequence_order="documents"`. All devices have the same ids,
    documents by ascending id, then equally much padding.

    Args:
      segment_ids: integers [T] or [B, T]; 0 is padding. Anything but a traced array, since the
        order is found in NumPy. Each row gets an order of its own.
      parts: the number of devices along the axis that splits the sequence.

    Raises:
      ValueError: the length of a document is no multiple of 2 · parts or T is none of parts, or an
        argument is of the wrong kind. Pad a document behind its end with tokens of its own id,
        whose loss does not count: no token before them attends to them.
    """
    parts, ids = check_positive_int("parts", parts), _known_ids(segment_ids)
    if ids.shape[-1] % parts:
        raise ValueError(
            f"balance: expected a length divisible by {parts} parts, got {ids.shape[-1]}"
        )
    rows = [_ordered(row, parts) for row in ids.reshape(-1, ids.shape[-1])]
    tokens = np.array(rows, np.int32).reshape(ids.shape)
    tokens.setflags(write=False)
    return Balance(tokens, parts)


def _known_ids(segment_ids: object) -> np.ndarray:
    if isinstance(segment_ids, Tracer):
        raise ValueError("balance: expected segment ids with values, got a traced array")
    ids = np.asarray(segment_ids)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise ValueError(
            f"balance: expected segment ids, integers [T] or [B, T], got {ids.dtype.name}"
            f"{list(ids.shape)}"
        )
    if ids.min() < 0:
        raise ValueError(f"balance: expected ids of at least 0, got {ids.min()}")
    return ids


def _ordered(ids: np.ndarray, parts: int) -> np.ndarray:
    """The tokens of one row of ids in the order in which the devices hold them."""
    tokens = np.argsort(ids, kind="stable")
    names, begins, lengths = np.unique(ids[tokens], return_index=True, return_counts=True)
    held, padding = list[np.ndarray](), tokens[:0]
    for name, begin, length in zip(names, begins, lengths, strict=True):
        document = tokens[begin : begin + length]
        if name == 0:
            padding = document
            continue
        if length % (2 * parts):
            raise ValueError(
                f"balance: expected lengths of documents that are multiples of {2 * parts} on "
                f"{parts} devices, got {length} tokens of id {name}"
            )
        chunks = document.reshape(2 * parts, -1)
        held.append(np.concatenate([chunks[:parts], chunks[: parts - 1 : -1]], axis=1))
    return np.concatenate([*held, padding.reshape(parts, -1)], axis=1).reshape(-1)
