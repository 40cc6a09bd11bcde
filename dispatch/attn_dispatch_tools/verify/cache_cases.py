"""Serving: a few queries in each row, and a cache of keys and values, contiguous or in pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import Step

_DTYPES = ("bfloat16", "float16")
_CAUSAL = {"is_causal": True, "alignment": "bottom_right"}
_HEADS = ((32, 8), (8, 8), (16, 1), (20, 4))
_PAGES = (0, 1, 2, 8, 16, 64, 128, 256, 1024)
"""Page sizes; 0: a contiguous cache."""

_FEATURES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": 1},
    "window": {"window": (40, 0)},
    "wide_window": {"window": (900, 0)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {"alibi": 1},
    "full": {"is_causal": False},
    "without_lse": {},
    "row_maximum": {"needs_max": True},
    "large_scores": {"magnitude": 6.0},
    "negative_scores": {"score_shift": -200.0},
    "negative_scale": {"scale": -0.2},
    "scale_zero": {"scale": 0.0},
    "sinks_and_window": {"sinks": 1, "window": (64, 0)},
    "query_lengths": {"some_queries": True},
}
_WHOLE_PAGE_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"soft_cap": 20.0},
    "window": {"window": (300, 0)},
    "window_to_both_sides": {"window": (290, 1), "is_causal": False},
    "cap_and_window": {"soft_cap": 20.0, "window": (270, 0)},
    "sinks_and_cap": {"sinks": 1, "soft_cap": 20.0},
    "full": {"is_causal": False, "soft_cap": 20.0},
}
"""Calls that give kernels whole pages, some with windows that cross pages."""

_TRANSFORMS = ("vmap", "scan", "eager", "donate")


def _lengths(s: int) -> tuple[int, ...]:
    """Five lengths of a cache of s keys: full, empty, one key, all but one, and about a third."""
    return s, 0, 1, s - 1, s // 3 + 1


Named = tuple[str, dict[str, Any]]
"""A case's name, without the family, and its fields."""


def _case(name: str, number: int, **facts: Any) -> Case:
    """A case; the dtype alternates with the number, and by default rows have `_lengths`."""
    s, t = facts["s"], facts["t"]
    facts = {"b": 5, "n": 8, "k": 2, "h": 64, "scale": 0.15, **_CAUSAL} | facts
    facts["dtype"] = _DTYPES[number % 2]
    if facts.pop("some_queries", False):
        facts["q_lengths"] = (t, t, 0, max(t - 1, 0), 1)
    kv_lengths = facts.pop("kv_lengths", _lengths(s))
    return Case(f"cache/{name}", v=facts["h"], kv_lengths=kv_lengths, inference=True, **facts)


def _sizes() -> Iterator[Named]:
    """Pages, heads, head dims and features."""
    for page, t in product(_PAGES, (1, 2, 4, 8, 33)):
        yield f"page{page}_t{t}", dict(page=page, t=t, s=max(512, 2 * page))
    for (n, k), t, page in product(_HEADS, (1, 4), (0, 16)):
        yield f"heads{n}_{k}_t{t}_page{page}", dict(n=n, k=k, t=t, s=400, page=page)
    for h, t, page in product((8, 80, 96, 128, 192, 256), (1, 3), (0, 32)):
        yield f"d{h}_t{t}_page{page}", dict(h=h, t=t, s=320, page=page)
    for feature, t, page in product(_FEATURES, (1, 4), (0, 16)):
        yield f"{feature}_t{t}_page{page}", dict(t=t, s=1024, page=page, **_FEATURES[feature])


def _serving() -> Iterator[Named]:
    """Transforms, shared pages, wrong lengths, long caches, and chunks of queries."""
    for transform, t in product(_TRANSFORMS, (1, 4)):
        yield f"{transform}_t{t}", dict(transform=transform, b=4, t=t, s=256, page=16,
            kv_lengths=(256, 0, 100, 1))  # fmt: skip
    for t in (1, 4, 64):
        yield f"shared_t{t}", dict(t=t, s=320, page=16, shared_pages=8)
        yield f"all_shared_t{t}", dict(t=t, s=320, page=16, shared_pages=20)
        yield f"page_of_24_t{t}", dict(t=t, s=240, page=24)
        yield f"wrong_length_t{t}", dict(t=t, s=128, page=16, kv_lengths=(128, -1, 129, 5, 64))
        yield f"long_t{t}", dict(b=1, t=t, s=16384, page=64, kv_lengths=(16000,))
    for t, page in product((9, 16, 17, 33, 300), (0, 8, 16, 64, 256)):
        s, mix = 768, (t, 1, 1, t // 2, 0)
        near = (s, max(page - 1, 0), page + 1, 5 * page // 2 + 3, page)
        yield f"chunk_t{t}_page{page}", dict(t=t, s=s, page=page, q_lengths=mix, kv_lengths=near)


def _whole_pages() -> Iterator[Named]:
    """Calls for which kernels read whole pages."""
    for t, page, feature in product((1, 3, 33), (0, 24, 64), _WHOLE_PAGE_FEATURES):
        near = (576, 63, 64, 65, 449)
        yield f"whole_{feature}_t{t}_page{page}", dict(t=t, s=576, page=page, kv_lengths=near,
            **_WHOLE_PAGE_FEATURES[feature])  # fmt: skip
    # What the score_mod adds depends on the batch row, not on the head. With pages of one key, a
    # window begins exactly where a page begins.
    by_row = (Step("r tanh((t - s) / 16)", 0, 0, 1.0, 8, "b"),)
    for t, page, window in product((1, 4), (1, 64), (None, 634)):
        yield f"sum_of_rows_t{t}_page{page}_window{window}", dict(t=t, s=960, page=page,
            score_mod=by_row, window=(window, None if window is None else 0),
            kv_lengths=(0, 528, 759, 960, 64))  # fmt: skip
    for (n, k), t in product(((16, 1), (20, 4), (4, 4)), (3, 12, 16, 40)):
        yield f"grouped{n}_{k}_t{t}", dict(n=n, k=k, t=t, s=2048, page=64)
    for h, page in product((128, 256), (48, 64)):
        yield f"whole_d{h}_page{page}", dict(h=h, t=40, s=576, page=page, soft_cap=20.0)


CACHE: tuple[Case, ...] = tuple(
    _case(name, number, **facts)
    for number, (name, facts) in enumerate(chain(_sizes(), _serving(), _whole_pages()))
)
