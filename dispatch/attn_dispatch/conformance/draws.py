"""Cases drawn by hypothesis: shapes, dtypes, lengths, masks and transforms all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from attn_dispatch.conformance.case import Case

_SHAPES = ["".join(x) for x in product("1b", "1n", "1t", "1s")]


@dataclass(frozen=True)
class Sizes:
    """What sizes are drawn from."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    """(query heads, kv heads)."""
    dtypes: tuple[str, ...]


# Few of each, so that the naive computation is compiled for few.
SMALL = Sizes((1, 7, 16), (8,), ((4, 2), (3, 3)), ("float32", "bfloat16"))
KERNELS = Sizes(
    (1, 33, 64, 128, 192, 256, 300, 320),
    (64, 128, 80, 256),
    ((4, 2), (4, 4), (4, 1), (3, 3)),
    ("float16", "bfloat16"),
)


def examples(count: int, seed: int) -> list[Case]:
    """That many cases of kernels' sizes; the same ones for the same seed and hypothesis."""
    found: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(cases(KERNELS))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return [replace(case, name=f"drawn/{seed}_{i}") for i, case in enumerate(found[:count])]


@st.composite
def cases(draw: st.DrawFn, sizes: Sizes) -> Case:
    """Any call that is valid, however unlikely."""
    transform = draw(st.sampled_from(("jit", "jit", "jit", "vmap", "scan", "checkpoint")))
    b = draw(st.sampled_from((2, 4))) if transform in ("vmap", "scan") else draw(_few(1, 3))
    t, s = draw(st.sampled_from(sizes.lengths)), draw(st.sampled_from(sizes.lengths))
    n, k = draw(st.sampled_from(sizes.heads))
    h = draw(st.sampled_from(sizes.head_dims))
    facts: dict[str, Any] = {
        "b": b, "t": t, "s": s, "n": n, "k": k, "h": h,
        "v": draw(st.sampled_from((h, h, h, max(h // 2, 1)))),
        "dtype": draw(st.sampled_from(sizes.dtypes)),
        "transform": transform,
        "scale": 1 / math.sqrt(h),
    }  # fmt: skip
    layout = draw(st.sampled_from(("plain", "lengths", "packed", "ragged")))
    facts |= _LAYOUTS[layout](draw, b, t, s)
    facts |= _who(draw, b, n, t, s, is_ragged=layout == "ragged")
    facts |= _scores(draw, b, n, t, s, facts["dtype"], is_ragged=layout == "ragged")
    facts |= _asked_for(draw, b)
    return Case("drawn/case", **facts)


def _few(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


def _seldom(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 3)) == 0


def _plain(draw: st.DrawFn, b: int, t: int, s: int) -> dict[str, Any]:
    return {}


def _lengths(draw: st.DrawFn, b: int, t: int, s: int) -> dict[str, Any]:
    facts = {}
    for name, length in (("q_lengths", t), ("kv_lengths", s)):
        if draw(st.booleans()):
            facts[name] = tuple(draw(_few(0, length)) for _ in range(b))
    return facts


def _packed(draw: st.DrawFn, b: int, t: int, s: int) -> dict[str, Any]:
    rows_q = tuple(_ids(draw, t) for _ in range(b))
    same = t == s and draw(st.booleans())
    rows_kv = rows_q if same else tuple(_ids(draw, s) for _ in range(b))
    most = draw(st.sampled_from((None, 4, 6)))
    return {"q_segments": rows_q, "kv_segments": rows_kv, "max_segments": most}


def _ids(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Ascending ids from 1 to 6, with padding anywhere between them."""
    ids: list[int] = []
    for document in range(1, 7):
        room = length - len(ids)
        ids += [0] * min(room, draw(st.sampled_from((0, 0, 0, 2))))
        room = length - len(ids)
        ids += [document] * draw(_few(0, room // 2 + 1 if room else 0))
    return tuple((ids + [0] * length)[:length])


def _ragged(draw: st.DrawFn, b: int, t: int, s: int) -> dict[str, Any]:
    sequences = draw(_few(1, 4))
    q, kv = (
        tuple((0, *sorted(draw(_few(0, length)) for _ in range(sequences))) for _ in range(b))
        for length in (t, s)
    )
    longest = tuple(max(1, *(y - x for row in rows for x, y in pairwise(row))) for rows in (q, kv))
    return {"cu_q": q, "cu_kv": kv, "longest": longest}


_LAYOUTS = {"plain": _plain, "lengths": _lengths, "packed": _packed, "ragged": _ragged}


def _who(draw: st.DrawFn, b: int, n: int, t: int, s: int, *, is_ragged: bool) -> dict[str, Any]:
    """Who may attend to whom."""
    facts: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "alignment": draw(st.sampled_from(("top_left", "bottom_right"))),
    }
    if draw(st.booleans()):
        side = st.none() | _few(0, max(t, s))
        facts["window"] = (draw(side), draw(side))
    if not is_ragged and _seldom(draw):
        facts["mask"] = _shape(draw, b, n, t, s)
        facts["dead_rows"] = draw(st.booleans())
    return facts


def _shape(draw: st.DrawFn, b: int, n: int, t: int, s: int) -> tuple[int, ...]:
    letters = {"1": 1, "b": b, "n": n, "t": t, "s": s}
    return tuple(letters[x] for x in draw(st.sampled_from(_SHAPES)))


def _scores(
    draw: st.DrawFn, b: int, n: int, t: int, s: int, dtype: str, *, is_ragged: bool
) -> dict[str, Any]:
    """What becomes of the scores."""
    facts: dict[str, Any] = {}
    if not is_ragged and _seldom(draw):
        facts["bias"] = _shape(draw, b, n, t, s)
        facts["bias_dtype"] = draw(st.sampled_from(("float32", dtype)))
        facts["infinite_bias"] = facts["bias"][2] > 1 and draw(st.booleans())
    for name in ("alibi", "sinks"):
        if _seldom(draw):
            facts[name] = draw(st.sampled_from((1, 1, b)))
    if _seldom(draw):
        facts["soft_cap"] = draw(st.sampled_from((2.0, 30.0)))
    elif _seldom(draw):
        facts |= draw(st.sampled_from(({"score_shift": -150.0}, {"magnitude": 5.0})))
    return facts


def _asked_for(draw: st.DrawFn, b: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"deterministic": _seldom(draw)}
    if _seldom(draw):
        facts["dropout"] = draw(st.sampled_from((0.1, 0.5)))
    if _seldom(draw):
        return facts | {"inference": True}
    return facts | {"lse_grad": _seldom(draw), "needs_max": _seldom(draw)}
