"""How many pairs and tiles of a mask are seen, relative to a causal call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attn_dispatch_tools.bench.masks import Mask

TILE = 128
"""The queries and keys of a tile, by which shares are stated whatever tiles a kernel has."""


@dataclass(frozen=True)
class Seen:
    """The seen pairs of one head, and the tiles with at least one such pair."""

    pairs: int
    tiles: int


@dataclass(frozen=True)
class Shares:
    """What a mask leaves, as shares of what a causal call of the same length has."""

    pairs: float
    tiles: float


@lru_cache(maxsize=256)
def seen(mask: Mask, tokens: int) -> Seen:
    """The numbers of a mask of so many queries and keys; time and memory grow with them alone."""
    ranges = key_ranges(mask, tokens)
    tiles, width = -(-tokens // TILE), -(-tokens // TILE) + 1
    changes = np.zeros((tiles, width), np.int64)
    query_tile = np.arange(tokens) // TILE
    pairs = 0
    for begin, end in ranges:
        is_there = begin < end
        pairs += int((end - begin)[is_there].sum())
        np.add.at(changes, (query_tile[is_there], begin[is_there] // TILE), 1)
        np.add.at(changes, (query_tile[is_there], (end[is_there] - 1) // TILE + 1), -1)
    return Seen(pairs, int((changes.cumsum(axis=1) > 0).sum()))


def shares(mask: Mask, tokens: int) -> Shares:
    """The shares of a mask of so many queries and keys."""
    found, causal = seen(mask, tokens), seen(Mask(), tokens)
    return Shares(found.pairs / causal.pairs, found.tiles / causal.tiles)


def key_ranges(mask: Mask, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first key and the end, by query, of ranges that do not overlap; some are empty."""
    t = np.arange(tokens)
    begin, end = np.zeros_like(t), t + 1
    ranges: list[tuple[np.ndarray, np.ndarray]] = []
    if mask.window:
        begin = np.maximum(begin, end - mask.window)
    if mask.sinks:
        ranges.append((np.zeros_like(t), np.minimum(begin, mask.sinks)))
    if mask.chunk:
        begin = np.maximum(begin, t // mask.chunk * mask.chunk)
    if mask.documents:
        begin = np.maximum(begin, group_ends(mask, tokens)[0])
    if mask.prefix:
        end = np.maximum(end, mask.prefix)
    if mask.image:
        end = np.maximum(end, group_ends(mask, tokens)[1])
    return [*ranges, (begin, end)]


def group_ends(mask: Mask, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The first position of each query's document or image, and its end; of text t and t."""
    groups = np.asarray(mask.groups(tokens))
    is_new = np.append(groups[1:] != groups[:-1], True)
    last = np.flatnonzero(is_new)
    first = np.append(0, last[:-1] + 1)
    run = np.append(0, np.cumsum(is_new)[:-1])
    t = np.arange(tokens)
    is_text = groups == 0
    return np.where(is_text, t, first[run]), np.where(is_text, t, last[run] + 1)
