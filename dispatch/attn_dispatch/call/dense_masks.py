"""The warning about a dense mask that only expresses causality or lengths, with its replacement."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.shapes import CallShape
from attn_dispatch.call.values import known_values
from attn_dispatch.warning import warn_of_convention

_MIN_PAIRS = 2**14
"""A mask with fewer pairs costs next to nothing."""
_MAX_ENTRIES = 2**20
"""Larger masks are not examined: it would take more than 0.1 ms."""
_OTHER_COUNTS = ("query_segment_ids", "key_value_segment_ids", "cu_seqlens_q", "page_table")

_warns_of_dense_masks = ContextVar("warns of dense masks", default=True)


@contextmanager
def without_dense_mask_warnings() -> Generator[None]:
    """Within this context nothing warns about masks: a layer made them, not its caller."""
    before = _warns_of_dense_masks.set(False)
    try:
        yield
    finally:
        _warns_of_dense_masks.reset(before)


def warn_of_dense_mask(arguments: Arguments, shape: CallShape, options: AttentionOptions) -> None:
    """Warn about a mask that other arguments of the call express more cheaply, if it can be read.

    Args:
      arguments: the arguments of the call, with arrays as the caller gave them.
      shape: the shapes of query and key.
      options: the options of the call.
    """
    given = arguments.mask
    if given is None or not _warns_of_dense_masks.get():
        return
    if not arguments.arrays.keys().isdisjoint(_OTHER_COUNTS):
        return
    sizes = (shape.seq_len_q, shape.seq_len_kv)
    if not all(isinstance(x, int) for x in sizes) or sizes[0] * sizes[1] < _MIN_PAIRS:
        return
    if np.size(given) > _MAX_ENTRIES or (mask := known_values(given)) is None:
        return
    instead = _as_causal(mask, arguments, shape, options) or _as_lengths(mask, arguments, shape)
    if instead:
        warn_of_convention(
            f"mask: {list(mask.shape)} only expresses {instead}, by which kernels skip hidden "
            "keys without reading a mask"
        )


def _as_causal(
    mask: np.ndarray, arguments: Arguments, shape: CallShape, options: AttentionOptions
) -> str | None:
    t, s = shape.seq_len_q, shape.seq_len_kv
    if mask.shape[-2:] != (t, s):
        return None
    mask = mask.reshape(-1, t, s)
    if options.meaning.causal_alignment == "top_left" and _is_diagonal(mask, 0):
        return "is_causal=True"
    given = arguments.query_seq_lengths, arguments.key_value_seq_lengths
    has_lengths = any(x is not None for x in given)
    is_free = (
        options.meaning.window == (None, None) and not options.meaning.is_causal and not has_lengths
    )
    if s > t and is_free and "alibi_slopes" not in options.operands and _is_diagonal(mask, s - t):
        return 'is_causal=True with causal_alignment="bottom_right"'
    return None


def _is_diagonal(mask: np.ndarray, offset: int) -> bool:
    """Whether in each mask [masks, T, S] query i attends to exactly the keys up to i + offset."""
    first = mask[0, 0]
    if not first[: offset + 1].all() or first[offset + 1 :].any():
        return False
    return bool((mask == np.tri(*mask.shape[1:], k=offset, dtype=bool)).all())


def _as_lengths(mask: np.ndarray, arguments: Arguments, shape: CallShape) -> str | None:
    """The argument that replaces a mask, if it hides the last keys of each batch row from all heads
    and queries, and nothing else."""
    if arguments.key_value_seq_lengths is not None or mask.ndim < 2:
        return None
    if mask.shape[-1] != shape.seq_len_kv or (mask.ndim > 2 and mask.shape[-3] != 1):
        return None
    rows = mask.reshape(-1, *mask.shape[-2:])
    first = rows[:, 0]
    descends = (first[:, :-1] >= first[:, 1:]).all()
    if not descends or first.all() or not first.any() or not (rows == first[:, None]).all():
        return None
    return "key_value_seq_lengths, the number of keys [batch]"
