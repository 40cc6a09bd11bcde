"""The grids: the cells to measure, in order.

In each grid the most informative cells come first, because a time limit may stop a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.masks import Mask

_TOKENS = 16384
_LENGTHS = (8192, 2048, 16384, 4096, 1024, 512)

MIXES: dict[str, tuple[tuple[int, ...], int]] = {
    "16 documents, even": (tuple(range(184, 1976, 112)), 4096),
    "16 documents, long tail": (
        (4096, 2731, 1910, 1502, 1213, 980, 812, 690, 586, 480, 393, 310, 249, 190, 147, 95), 4096
    ),
    "64 short documents": (tuple(range(67, 451, 6)), 512),
}  # fmt: skip
"""The lengths of documents, 16,384 tokens in all, and the greatest length that callers declare."""


def _small() -> Iterator[Cell]:
    """Calls whose kernels take less time than the host needs to launch them."""
    for batch, seq_len, heads, dim, is_causal in (
        (1, 128, 8, 64, False),
        (1, 128, 8, 64, True),
        (1, 512, 8, 64, True),
        (8, 128, 8, 64, False),
        (1, 1024, 16, 128, True),
    ):
        family = f"{heads} heads d{dim} {'causal' if is_causal else 'full'}"
        yield Cell("small", family, batch, seq_len, heads, heads, dim, dim, is_causal)


def _layers() -> Iterator[Cell]:
    """Small calls inside of a larger program."""
    for batch, seq_len in ((1, 128), (1, 512), (8, 512)):
        yield Cell("layers", "12 calls, 8 heads d64 causal", batch, seq_len, 8, 8, 64, 64, calls=12)


def _gqa() -> Iterator[Cell]:
    """Grouped queries in a batch of one, as in NVIDIA's tables."""
    for seq_len in (8192, 2048, 16384):
        yield Cell("gqa", "d128 causal, 64/8 heads", 1, seq_len, 64, 8, 128, 128)


def _packed() -> Iterator[Cell]:
    for name, (lengths, longest) in MIXES.items():
        yield Cell(
            "packed", name, 1, sum(lengths), 32, 8, 128, 128, lengths=lengths, longest=longest
        )


def _window() -> Iterator[Cell]:
    for family, heads, kv_heads in (("d128", 16, 16), ("d128, 32/8 heads", 32, 8)):
        family += " window 1024"
        yield Cell("window", family, 1, 16384, heads, kv_heads, 128, 128, window=1024)


def _mla() -> Iterator[Cell]:
    """Multi-head latent attention in training, where keys are wider than values."""
    for seq_len in (8192, 2048, 16384):
        yield Cell("mla", "192/128 causal", _TOKENS // seq_len, seq_len, 16, 16, 192, 128)


def _d192() -> Iterator[Cell]:
    for seq_len in (8192, 2048, 16384):
        for is_causal in (True, False):
            family = f"d192 {'causal' if is_causal else 'full'}"
            yield Cell("d192", family, _TOKENS // seq_len, seq_len, 8, 8, 192, 192, is_causal)


def _dense() -> Iterator[Cell]:
    """The cells of FlashAttention's benchmark: 16,384 tokens, heads · dim = 2,048."""
    for seq_len in _LENGTHS:
        for dim in (128, 64, 256):
            for is_causal in (True, False):
                heads, family = 2048 // dim, f"d{dim} {'causal' if is_causal else 'full'}"
                batch = _TOKENS // seq_len
                yield Cell("dense", family, batch, seq_len, heads, heads, dim, dim, is_causal)


def _long() -> Iterator[Cell]:
    for seq_len in (32768, 131072, 65536, 16384):
        yield Cell("long", "d128 causal, long", 1, seq_len, 16, 16, 128, 128)


MASK_LENGTHS = (32768, 8192)


def masks_of(tokens: int) -> dict[str, Mask]:
    """The masks of the grid "masks", which leave 4 to 106 % of a causal call's tiles."""
    images = Mask(image=tokens // 8)
    return {
        "causal": Mask(),
        "window 4096 and 64 sinks": Mask(window=4096, sinks=64),
        "prefix": Mask(prefix=tokens // 4),
        "8 documents": Mask(documents=8),
        "images": replace(images, has_ends=True),
        "window 4096": Mask(window=4096),
        "2 chunks": Mask(chunk=tokens // 2),
        "window 1024": Mask(window=1024),
        "32 uneven documents": Mask(documents=32, is_uneven=True),
        "images by number": images,
    }


def _masks() -> Iterator[Cell]:
    """Masks that leave few and many tiles."""
    for seq_len in MASK_LENGTHS:
        for name, mask in masks_of(seq_len).items():
            yield Cell("masks", name, 1, seq_len, 32, 8, 128, 128, mask=mask)
    short = masks_of(2048)
    for name in ("prefix", "images", "2 chunks"):
        yield Cell("masks", name, 4, 2048, 32, 8, 128, 128, mask=short[name])


GRIDS: dict[str, tuple[Cell, ...]] = {
    "small": tuple(_small()),
    "layers": tuple(_layers()),
    "gqa": tuple(_gqa()),
    "packed": tuple(_packed()),
    "window": tuple(_window()),
    "mla": tuple(_mla()),
    "d192": tuple(_d192()),
    "dense": tuple(_dense()),
    "long": tuple(_long()),
    "masks": tuple(_masks()),
}
assert all(sum(lengths) == _TOKENS for lengths, _ in MIXES.values())
