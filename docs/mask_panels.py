"""The calls whose masks docs/semantics.md shows.

draw_masks.py draws them and those of mod_panels.py; tests/docs/test_draw_masks.py compares them
with the results of real calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_dispatch_tools.pictures.panel import Figure, Panel

_CAUSAL: dict[str, Any] = {"is_causal": True}
_BOTTOM_RIGHT: dict[str, Any] = {"causal_alignment": "bottom_right"}
_ALIGNMENTS: dict[str, dict[str, Any]] = {"top_left": {}, "bottom_right": _BOTTOM_RIGHT}


def _causal() -> Figure:
    sizes = {"T < S": (5, 8), "T = S": (6, 6), "T > S": (8, 5)}
    rows = (
        tuple(Panel(f"{name}, {which}", *size, _CAUSAL | how) for which, size in sizes.items())
        for name, how in _ALIGNMENTS.items()
    )
    return Figure("causal", tuple(rows))


def _windows() -> Figure:
    windows: dict[str, dict[str, Any]] = {
        "(2, 0)": {"local_window_size": (2, 0)},
        "(0, 2)": {"local_window_size": (0, 2)},
        "(2, 1)": {"local_window_size": (2, 1)},
        "(None, 1)": {"local_window_size": (None, 1)},
        "2, causal": {"local_window_size": 2, "is_causal": True},
    }
    rows = (
        tuple(Panel(f"{which}, {name}", 5, 8, window | how) for which, window in windows.items())
        for name, how in _ALIGNMENTS.items()
    )
    return Figure("windows", tuple(rows))


def _lengths() -> Figure:
    keys = {"key_value_seq_lengths": np.array([6], np.int32)}
    both = {"query_seq_lengths": np.array([4], np.int32)} | keys
    row = (
        Panel("6 keys", 5, 8, keys),
        Panel("4 queries, 6 keys", 5, 8, both),
        Panel("… causal, top_left", 5, 8, both | _CAUSAL),
        Panel("… causal, bottom_right", 5, 8, both | _CAUSAL | _BOTTOM_RIGHT),
        Panel("… window 1, bottom_right", 5, 8, both | {"local_window_size": 1} | _BOTTOM_RIGHT),
    )
    return Figure("lengths", (row,))


def _segments() -> Figure:
    def panel(title: str, queries: str, keys: str, **arguments: Any) -> Panel:
        sides = {"query_segment_ids": queries, "key_value_segment_ids": keys}
        ids = {side: np.array([[int(x) for x in text]]) for side, text in sides.items()}
        return Panel(title, len(queries), len(keys), ids | arguments)

    own, queries, keys = "11122220", "11222", "1112222"
    return Figure(
        "segments",
        (
            (
                panel("self attention", own, own),
                panel("causal", own, own, **_CAUSAL),
                panel("window (1, 1)", own, own, local_window_size=1),
                panel("ids in any order", "11022013", "11022013"),
            ),
            (
                panel("cross attention", queries, keys),
                panel("causal, top_left", queries, keys, **_CAUSAL),
                panel("causal, bottom_right", queries, keys, **_CAUSAL, **_BOTTOM_RIGHT),
                panel("(1, 0), bottom_right", queries, keys, local_window_size=(1, 0),
                      **_BOTTOM_RIGHT),
            ),
        ),
    )  # fmt: skip


def _mask() -> Figure:
    pairs = np.random.default_rng(3).random((5, 8)) < 0.6
    pairs[2] = False  # a row that attends nothing
    keys = np.arange(8)[None] % 3 != 1
    row = (
        Panel("mask [T, S]", 5, 8, {"mask": pairs}),
        Panel("mask [1, S]", 5, 8, {"mask": keys}),
        Panel("mask [T, S], causal", 5, 8, {"mask": pairs} | _CAUSAL),
    )
    return Figure("mask", (row,))


def _alibi() -> Figure:
    slopes = {"alibi_slopes": np.ones(1, np.float32)}
    row = (
        Panel("top_left", 5, 8, slopes),
        Panel("bottom_right", 5, 8, slopes | _BOTTOM_RIGHT),
        Panel("causal, bottom_right", 5, 8, slopes | _CAUSAL | _BOTTOM_RIGHT),
    )
    return Figure("alibi", (row,))


def _bias() -> Figure:
    shapes: dict[str, tuple[int, ...]] = {
        "[N, T, S]": (2, 3, 3), "[T, S]": (3, 3), "[1, S]": (1, 3), "[T, 1]": (3, 1),
        "[N, 1, 1]": (2, 1, 1),
    }  # fmt: skip
    numbered = {name: np.arange(np.prod(x), dtype=np.float32) for name, x in shapes.items()}
    rows = (
        tuple(
            Panel(f"{name} head {head}", 3, 3, {"bias": numbered[name].reshape(shape)}, 2, head)
            for name, shape in shapes.items()
        )
        for head in (0, 1)
    )
    return Figure("bias", tuple(rows))


FIGURES = (_causal(), _windows(), _lengths(), _segments(), _mask(), _alibi(), _bias())
