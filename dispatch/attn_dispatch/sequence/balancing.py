"""Chunks of packed documents given to devices, so that all have nearly equal work."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from jax.core import Tracer

from attn_dispatch.call.static_arguments import check_positive_int

CHUNK = 512
"""The tokens in a chunk, which balance 131,072 tokens on 32 devices; chunks of 2,048 do not."""


@dataclass(frozen=True, eq=False)
class Balance:
    """Which chunks of a sequence each device holds. `reorder` and `restore` take it as `order`."""

    chunks: np.ndarray
    """int32 [..., chunks]: the chunks in the order in which the devices hold them. Each device has
    equally many, in ascending order."""
    chunk: int
    """The tokens in a chunk."""
    load: np.ndarray
    """float64 [..., parts]: the work of each device: pairs of a query and a key that it attends."""

    @property
    def parts(self) -> int:
        """The number of devices."""
        return self.load.shape[-1]

    @property
    def permutation(self) -> np.ndarray:
        """int32 [..., T]: the token at each place of the reordered sequence."""
        return tokens_of(self.chunks, self.chunk)

    @property
    def max_over_mean(self) -> float:
        """The work of the busiest device over the mean; of several rows the largest. 1 is best."""
        mean = self.load.mean(axis=-1)
        return float((self.load.max(axis=-1) / np.where(mean == 0, 1, mean)).max(initial=1.0))


def balance(segment_ids: object, parts: int, chunk: int = CHUNK) -> Balance:
    """Give each device equally many chunks of packed documents, and nearly equal work.

    The work of a chunk is what causal attention within documents computes for its queries: the sum
    of the keys up to each in its document. The chunks with most work come first, each given to the
    device that has least work and room for another. Exchanged heads need no such order: there every
    device has all rows.

    Args:
      segment_ids: integers [T] or [B, T]; 0 is padding, which costs nothing. Anything but a traced
        array, since the order is found in NumPy. Each row gets an order of its own.
      parts: the number of devices along the axis that splits the sequence.
      chunk: the tokens in a chunk. Small ones balance better, but kernels compute whole tiles, of
        up to 256 tokens. With fewer than some eight chunks per device the balance is poor:
        `Balance.max_over_mean` tells.

    Raises:
      ValueError: T is no multiple of parts · chunk, or an argument is of the wrong kind.
    """
    parts, chunk = check_positive_int("parts", parts), check_positive_int("chunk", chunk)
    ids = _known_ids(segment_ids)
    if ids.shape[-1] % (parts * chunk):
        raise ValueError(
            f"balance: expected a length divisible by parts · chunk, {parts} · {chunk} = "
            f"{parts * chunk}, got {ids.shape[-1]}"
        )
    rows = [_balanced(_work(row, chunk), parts) for row in ids.reshape(-1, ids.shape[-1])]
    leading = ids.shape[:-1]
    chunks = np.array([x for x, _ in rows], np.int32).reshape(*leading, -1)
    load = np.array([x for _, x in rows], np.float64).reshape(*leading, parts)
    for x in (chunks, load):
        x.setflags(write=False)
    return Balance(chunks, chunk, load)


def tokens_of(chunks: np.ndarray, chunk: int) -> np.ndarray:
    """The tokens, int32 [..., T], of chunks [..., chunks] in their order."""
    tokens = chunks[..., None] * chunk + np.arange(chunk, dtype=np.int32)
    return tokens.reshape(*chunks.shape[:-1], -1)


def _known_ids(segment_ids: object) -> np.ndarray:
    if isinstance(segment_ids, Tracer):
        raise ValueError("balance: expected segment ids with values, got a traced array")
    ids = np.asarray(segment_ids)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise ValueError(
            f"balance: expected segment ids, integers [T] or [B, T], got {ids.dtype.name}"
            f"{list(ids.shape)}"
        )
    return ids


def _work(ids: np.ndarray, chunk: int) -> np.ndarray:
    """The pairs that causal attention computes for each chunk of one row of ids."""
    order = np.argsort(ids, kind="stable")  # ids may be in any order
    by_id = ids[order]
    begins = np.searchsorted(by_id, by_id, "left")
    keys = np.empty(ids.shape, np.float64)
    keys[order] = np.where(by_id == 0, 0, np.arange(len(ids)) - begins + 1)
    return keys.reshape(-1, chunk).sum(axis=1)


def _balanced(work: np.ndarray, parts: int) -> tuple[list[int], list[float]]:
    """The chunks of all devices, one device after the other, and each device's work.

    Longest processing time first (Graham 1969), with as many chunks for each device.
    """
    room = len(work) // parts
    held: list[list[int]] = [[] for _ in range(parts)]
    load = [0.0] * parts
    least = [(0.0, part) for part in range(parts)]
    for chunk in np.argsort(-work, kind="stable"):
        before, part = heapq.heappop(least)
        held[part].append(int(chunk))
        load[part] = before + float(work[chunk])
        if len(held[part]) < room:
            heapq.heappush(least, (load[part], part))
    return [chunk for chunks in held for chunk in sorted(chunks)], load
