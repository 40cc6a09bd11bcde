"""The calls whose masks and scores docs/mods.md shows; see mask_panels.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_dispatch import mods
from attn_dispatch_tools.pictures.panel import Figure, Panel


def _mask_row(name: str, masks: dict[str, Any], seq_len_q: int, seq_len_kv: int) -> Figure:
    """A row of panels: for each title, a mask_mod or a dictionary of arguments."""
    arguments = {x: y if isinstance(y, dict) else {"mask_mod": y} for x, y in masks.items()}
    row = (Panel(title, seq_len_q, seq_len_kv, given) for title, given in arguments.items())
    return Figure(name, (tuple(row),))


def _soft_cap() -> Figure:
    scores = np.array([0, 5, 10, 20, 40], np.float32)
    given = {"query": np.ones((1, 1, 1, 1), np.float32), "key": scores[None, :, None, None]}
    capped = {"score_mod": mods.soft_cap(10)}
    row = (
        Panel("scores", 1, 5, given | {"score_mod": lambda score, b, n, t, s: score}),
        Panel("soft_cap(10)", 1, 5, given | capped),
    )
    return Figure("mod_soft_cap", (row,))


def _alibi() -> Figure:
    mod = {"score_mod": mods.alibi(np.array([1, 2], np.float32))}
    row = (
        Panel("alibi, slope 1", 5, 8, mod, 2, 0),
        Panel("alibi, slope 2", 5, 8, mod, 2, 1),
        Panel("alibi, slope 1, causal", 5, 8, mod | {"is_causal": True}, 2, 0),
    )
    return Figure("mod_alibi", (row,))


def _relative_position() -> Figure:
    numbers = np.arange(8, dtype=np.float32)[:, None]
    both = {"score_mod": mods.relative_position(numbers, max_distance=8)}
    one = {"score_mod": mods.relative_position(numbers, bidirectional=False, max_distance=10)}
    row = (
        Panel("bidirectional, max_distance 8", 11, 11, both),
        Panel("not bidirectional, max_distance 10", 11, 11, one | {"is_causal": True}),
    )
    return Figure("mod_relative_position", (row,))


def _prefix_lm() -> Figure:
    lengths = {f"prefix_lm, length {x}": mods.prefix_lm(np.array([x])) for x in (1, 3, 6)}
    return _mask_row("mod_prefix_lm", lengths, 8, 8)


def _shared_prefix() -> Figure:
    layouts = {
        "one prompt": (np.array([4]), np.array([[3, 2, 2]])),
        "two prompts": (np.array([[3, 2]]), np.array([[[2, 1], [2, 1]]])),
    }
    return _mask_row(
        "mod_shared_prefix",
        {f"shared_prefix, {x}": mods.shared_prefix(*y, 12) for x, y in layouts.items()},
        12,
        12,
    )


def _document_mask() -> Figure:
    documents = np.array([[5, 5, 7, 7, 7, 5, 2, 2]])
    mask = {"mask_mod": mods.document_mask(documents)}
    masks = {"documents 5 5 7 7 7 5 2 2": mask, "the same, causal": mask | {"is_causal": True}}
    return _mask_row("mod_document_mask", masks, 8, 8)


def _dilated_window() -> Figure:
    sides = [(6, 2), (6, 3), (2, 1)]
    masks = {f"dilated_window{x}": mods.dilated_window(*x) for x in sides}
    return _mask_row("mod_dilated_window", masks, 10, 10)


def _chunked_window() -> Figure:
    masks = {f"chunked_window({x})": mods.chunked_window(x) for x in (3, 4)}
    return _mask_row("mod_chunked_window", masks, 10, 10)


def _neighborhood_2d() -> Figure:
    masks = {"neighborhood_2d(4, 5, 1)": mods.neighborhood_2d(4, 5, 1)}
    return _mask_row("mod_neighborhood_2d", masks, 20, 20)


def _tree_mask() -> Figure:
    parents = np.array([-1, 0, 0, 1, 1, 2])
    lengths = (0, 3)
    masks = {f"tree_mask, cache_length {x}": mods.tree_mask(parents, x) for x in lengths}
    return _mask_row("mod_tree_mask", masks, 6, 10)


def _combined() -> Figure:
    window, chunks = mods.dilated_window(6, 2), mods.chunked_window(4)
    masks = {
        "any_of(window, chunks)": mods.any_of(window, chunks),
        "all_of(window, chunks)": mods.all_of(window, chunks),
        "all_of(chunks, not_(window))": mods.all_of(chunks, mods.not_(window)),
    }
    return _mask_row("mod_combined", masks, 9, 9)


def _with_query_offset() -> Figure:
    chunks = mods.chunked_window(4)
    masks = {"chunked_window(4)": chunks, "… with offset 5": mods.with_query_offset(chunks, 5)}
    return _mask_row("mod_with_query_offset", masks, 5, 10)


FIGURES = (
    _soft_cap(), _alibi(), _relative_position(), _prefix_lm(), _shared_prefix(), _document_mask(),
    _dilated_window(), _chunked_window(), _neighborhood_2d(), _tree_mask(), _combined(),
    _with_query_offset(),
)  # fmt: skip
