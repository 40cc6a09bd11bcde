"""Masks as intervals of keys in NumPy, by way of the dense mask: for tests, and to judge builders.

A row of `rows` is (start, length, start, length): it sees the keys of both intervals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _stacked(*parts: np.ndarray | int) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*parts), axis=-1).astype(np.int32)


def causal(length: int, keys: int) -> np.ndarray:
    t = np.arange(length)
    return _stacked(0, np.clip(t + 1 + keys - length, 0, keys), 0, 0)[None]


def full(length: int, keys: int) -> np.ndarray:
    return _stacked(0, np.full(length, keys), 0, 0)[None]


def window(length: int, keys: int, left: int) -> np.ndarray:
    """The last `left` keys up to the diagonal, which ends in the last corner."""
    end = np.clip(np.arange(length) + 1 + keys - length, 0, keys)
    start = np.maximum(end - left, 0)
    return _stacked(start, end - start, 0, 0)[None]


def window_and_sinks(length: int, keys: int, left: int, sinks: int) -> np.ndarray:
    """The same, and the first `sinks` keys of those up to the diagonal."""
    rows = window(length, keys, left)
    end = rows[..., 0] + rows[..., 1]
    first = np.minimum(sinks, end)
    return _stacked(rows[..., 0], rows[..., 1], 0, first)


def prefix(length: int, keys: int, size: int) -> np.ndarray:
    end = np.maximum(causal(length, keys)[..., 1], min(size, keys))
    return _stacked(0, end, 0, 0)


def documents(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Causal documents of drawn lengths, other ones in each batch row."""
    ids = np.sort(rng.integers(0, max(length // 100, 2), (batch, length)), axis=1)
    t = np.arange(length)
    starts = np.where(np.diff(ids, axis=1, prepend=-1) != 0, t, 0)
    start = np.maximum.accumulate(starts, axis=1)
    return _stacked(start, t + 1 - start, 0, 0)


def drawn(rng: np.random.Generator, batch: int, length: int, keys: int) -> np.ndarray:
    """Two drawn intervals for each row, and for a third of the rows none."""
    starts = rng.integers(0, keys, (batch, length, 2))
    lengths = rng.integers(0, keys - starts + 1)
    lengths[:, rng.random(length) < 1 / 3] = 0
    return _stacked(starts[..., 0], lengths[..., 0], starts[..., 1], lengths[..., 1])


def blocky(rng: np.random.Generator, batch: int, length: int, keys: int) -> np.ndarray:
    """Drawn intervals that runs of rows share, so that whole tiles are seen or not."""
    runs = drawn(rng, batch, length // 100 + 1, keys)
    return np.repeat(runs, 100, axis=1)[:, :length]


def few_rows(rng: np.random.Generator, batch: int, length: int, keys: int) -> np.ndarray:
    """Drawn intervals of a few rows; the others see nothing, so most tiles are empty."""
    rows = drawn(rng, batch, length, keys)
    rows[:, rng.random(length) < 0.98] = 0
    return rows


def masks(seed: int, batch: int, length: int, keys: int) -> dict[str, np.ndarray]:
    """The rows of every kind of mask for one shape, [1|B, length, 4]."""
    rng = np.random.default_rng(seed)
    made: dict[str, Callable[[], np.ndarray]] = {
        "causal": lambda: causal(length, keys),
        "full": lambda: full(length, keys),
        "window": lambda: window(length, keys, max(keys // 5, 1)),
        "narrow window": lambda: window(length, keys, 1),
        "prefix": lambda: prefix(length, keys, keys // 3),
        "window and sinks": lambda: window_and_sinks(length, keys, max(keys // 8, 1), 17),
        "random": lambda: drawn(rng, batch, length, keys),
        "blocky": lambda: blocky(rng, batch, length, keys),
        "few rows": lambda: few_rows(rng, batch, length, keys),
        "nothing": lambda: np.zeros((1, length, 4), np.int32),
    }
    if length == keys:
        made["documents"] = lambda: documents(rng, batch, length)
    return {name: make() for name, make in made.items()}


def dense(rows: np.ndarray, keys: int) -> np.ndarray:
    """Whether a row sees a key, bool [1|B, T, keys]."""
    k = np.arange(keys)
    first, second = ((rows[..., i, None], rows[..., i + 1, None]) for i in (0, 2))
    seen = [(k >= start) & (k < start + length) for start, length in (first, second)]
    return seen[0] | seen[1]


def lists(seen: np.ndarray, tile_m: int, tile_n: int, *, by_keys: bool = False) -> Lists:
    """Lists of tiles of a dense mask: of keys for each tile of rows, or the other way.

    Args:
      seen: bool [1|B, T, S].
      tile_m: query rows of a tile.
      tile_n: keys of a tile.
      by_keys: whether to list tiles of query rows for each tile of keys, for a backward pass.
    """
    some, every = _tiles(seen, tile_m, tile_n)
    if by_keys:
        some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
    return *_listed(some & ~every), *_listed(every)


def _tiles(seen: np.ndarray, tile_m: int, tile_n: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether some, and whether all, pairs of real rows and keys of each tile are seen."""
    batch, length, keys = seen.shape
    m, n = -(-length // tile_m), -(-keys // tile_n)
    padding = ((0, 0), (0, m * tile_m - length), (0, n * tile_n - keys))
    shape = (batch, m, tile_m, n, tile_n)
    some = np.pad(seen, padding).reshape(shape).any((2, 4))
    every = np.pad(seen, padding, constant_values=True).reshape(shape).all((2, 4))
    return np.asarray(some), np.asarray(every)


def _listed(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts [B, 1, M] and ascending indices [B, 1, M, L] of the tiles chosen in each line."""
    counts = chosen.sum(axis=2, dtype=np.int32)
    width = chosen.shape[2]
    order = np.argsort(~chosen, axis=2, kind="stable").astype(np.int32)
    indices = np.where(np.arange(width) < counts[..., None], order, 0).astype(np.int32)
    return counts[:, None], indices[:, None]
