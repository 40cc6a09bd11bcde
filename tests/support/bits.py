"""Masks of one bit a pair in NumPy, by way of the dense mask."""

from __future__ import annotations

import numpy as np


def packed(seen: np.ndarray) -> np.ndarray:
    """The bits uint32 [..., W] of a dense mask, bool [..., S]."""
    padding = [(0, 0)] * (seen.ndim - 1) + [(0, -seen.shape[-1] % 32)]
    as_bytes = np.packbits(np.pad(seen, padding), axis=-1, bitorder="little")
    return np.ascontiguousarray(as_bytes).view("<u4").astype(np.uint32)


def dense(bits: np.ndarray, keys: int) -> np.ndarray:
    """The dense mask of bits, bool [..., keys], and that no bit is set past the last key."""
    found = np.asarray(bits)[..., None] >> np.arange(32, dtype=np.uint32) & 1 > 0
    found = found.reshape(*found.shape[:-2], -1)
    assert not found[..., keys:].any()
    return found[..., :keys]


def drawn(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> np.ndarray:
    """A dense mask [B, N, T, S] with tiles of all kinds, and rows that see nothing."""
    batch, heads, length, keys = shape
    share = rng.choice([0.0, 0.5, 1.0], (batch, heads, length // 100 + 1, keys // 100 + 1))
    share = share.repeat(100, axis=2).repeat(100, axis=3)[:, :, :length, :keys]
    seen = rng.random(shape) < share
    seen[:, :, rng.random(length) < 0.1] = False
    return seen
