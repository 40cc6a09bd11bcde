"""Cases drawn at random: shapes, dtypes, layouts, masks, scores and transforms all at once.

Unusual choices are likely: scales of 0 and below, one query, one key, sequences without keys, value
dims of any size, rows of padding only, scores in the hundreds, Inf beside NaN in padding, gradients
of only some operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from attn_dispatch_tools.verify.case import Case, Transform
from attn_dispatch_tools.verify.drawn_mods import ALONE, FORMULAS, MASKS, OF_THE_PAST, Step
from attn_dispatch_tools.verify.seeded_random import SeededRandom

Facts = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes to draw from; a size that is listed twice is twice as likely."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    """Value dims beside the head dim, its half and its double."""
    heads: tuple[tuple[int, int], ...]
    """(query heads, kv heads)."""
    dtypes: tuple[str, ...]


SMALL = Sizes(
    lengths=(1, 7, 7, 16, 16),
    head_dims=(8,),
    value_dims=(3,),
    heads=((4, 2), (3, 3)),
    dtypes=("float32", "bfloat16", "float16"),
)
KERNELS = Sizes(
    lengths=(1, 2, 33, 64, 100, 128, 192, 256, 300, 320),
    head_dims=(64, 64, 128, 128, 8, 20, 72, 80, 96, 136, 160, 192, 200, 256),
    value_dims=(16, 48, 64, 100, 112, 128, 144, 192, 224, 256),
    heads=((4, 2), (4, 4), (4, 1), (3, 3)),
    dtypes=("float16", "bfloat16"),
)

_TRANSFORMS: tuple[Transform, ...] = (
    "jit", "jit", "jit", "jit", "vmap", "vmap", "scan", "checkpoint", "eager", "donate",
)  # fmt: skip
_LAYOUTS = ("plain", "plain", "lengths", "packed", "ragged")
_OPEN = 2**31 - 1
"""A side of a traced window that hides nothing."""
_SHAPES = ["".join(x) for x in product("1b", "1n", "1t", "1s")]


def examples(count: int, seed: int, sizes: Sizes = KERNELS) -> list[Case]:
    """`count` cases, the same for the same seed and sizes everywhere.

    A larger count adds cases at the end.
    """
    return [_case(f"drawn/{seed}_{i}", SeededRandom(f"{seed}/{i}"), sizes) for i in range(count)]


def _case(name: str, rng: SeededRandom, sizes: Sizes) -> Case:
    transform = rng.one_of(_TRANSFORMS)
    b = rng.one_of((2, 4)) if transform in ("vmap", "scan") else rng.between(1, 3)
    t, s = rng.one_of(sizes.lengths), rng.one_of(sizes.lengths)
    n, k = rng.one_of(sizes.heads)
    h = rng.one_of(sizes.head_dims)
    other_dims = (max(h // 2, 1), min(2 * h, 256), *sizes.value_dims)
    v = h if rng.is_one_in(2) else rng.one_of(other_dims)
    dtype = rng.one_of(sizes.dtypes)
    layout = rng.one_of(_LAYOUTS)
    facts: Facts = {"b": b, "t": t, "s": s, "n": n, "k": k, "h": h, "v": v, "dtype": dtype}
    facts |= {"transform": transform, "mixed_poison": rng.is_one_in(2)}
    facts |= LAYOUTS[layout](rng, b, t, s)
    facts |= _pairs(rng, b, n, t, s, layout)
    facts |= _scores(rng, b, n, t, s, h, dtype, layout)
    facts |= _dropout_and_results(rng, b, transform)
    # Separate seeds for what was added later keep the rest of a case the same.
    facts |= _traced_window(SeededRandom(f"{name}/window"), b, facts)
    facts |= _mods(SeededRandom(f"{name}/mods"), facts)
    facts |= _cache(SeededRandom(f"{name}/cache"), facts, sizes)
    facts |= orders(SeededRandom(f"{name}/orders"), facts)
    case = Case(name, **facts)
    if not case.inference and rng.is_one_in(3):
        facts["wanted"] = rng.some_of(case.differentiable)
    return Case(name, **facts)


def _plain(rng: SeededRandom, b: int, t: int, s: int) -> Facts:
    return {}


def _lengths(rng: SeededRandom, b: int, t: int, s: int) -> Facts:
    which = rng.one_of((("q_lengths",), ("kv_lengths",), ("q_lengths", "kv_lengths")))
    full = {"q_lengths": t, "kv_lengths": s}
    return {name: tuple(any_length(rng, full[name]) for _ in range(b)) for name in which}


def _length(rng: SeededRandom, full: int) -> int:
    """A length, often 0, 1 or the full one."""
    return min(full, rng.one_of((0, 1, full, *(rng.up_to(full) for _ in range(4)))))


def any_length(rng: SeededRandom, full: int) -> int:
    """A length; one in twelve is invalid and makes its batch row NaN."""
    return rng.one_of((-2, full + 3)) if rng.is_one_in(12) else _length(rng, full)


def _packed(rng: SeededRandom, b: int, t: int, s: int) -> Facts:
    rows_q = tuple(_ids(rng, t) for _ in range(b))
    same = t == s and rng.is_one_in(2)
    rows_kv = rows_q if same else tuple(_ids(rng, s) for _ in range(b))
    most = rng.one_of((None, 4, 6, 6, 6, 6))
    return {"q_segments": rows_q, "kv_segments": rows_kv, "max_segments": most}


def _ids(rng: SeededRandom, length: int) -> tuple[int, ...]:
    """Ascending ids from 1 to 6, with padding anywhere between them; some ids may be missing."""
    ids: list[int] = []
    for document in range(1, 7):
        room = length - len(ids)
        ids += [0] * min(room, rng.one_of((0, 0, 0, 2)))
        room = length - len(ids)
        ids += [document] * (rng.up_to(room // 2 + 1) if room else 0)
    return tuple((ids + [0] * length)[:length])


def _ragged(rng: SeededRandom, b: int, t: int, s: int) -> Facts:
    sequences = rng.between(1, 4)
    q, kv = (
        tuple((0, *sorted(_length(rng, length) for _ in range(sequences))) for _ in range(b))
        for length in (t, s)
    )
    longest = tuple(max(1, *(y - x for row in rows for x, y in pairwise(row))) for rows in (q, kv))
    return {"cu_q": q, "cu_kv": kv, "longest": longest}


LAYOUTS = {"plain": _plain, "lengths": _lengths, "packed": _packed, "ragged": _ragged}


def _pairs(rng: SeededRandom, b: int, n: int, t: int, s: int, layout: str) -> Facts:
    """Which pairs may attend."""
    facts: Facts = {
        "is_causal": rng.is_one_in(2),
        "alignment": rng.one_of(("top_left", "top_left", "bottom_right")),
    }
    if rng.is_one_in(3):
        sides = (None, 0, 1, rng.up_to(max(t, s)), rng.up_to(max(t, s)))
        facts["window"] = (rng.one_of(sides), rng.one_of(sides))
    if layout != "ragged" and rng.is_one_in(6):
        facts["mask"] = dense_shape(rng, b, n, t, s)
        facts["dead_rows"] = rng.is_one_in(2)
    return facts


def _traced_window(rng: SeededRandom, b: int, facts: Facts) -> Facts:
    """Some windows as an array, one row for all batch rows or for each; few are invalid."""
    sides = facts.get("window", (None, None))
    if sides == (None, None) or not rng.is_one_in(4):
        return {}
    row = tuple(_OPEN if side is None else side for side in sides)
    rows = [row] * rng.one_of((1, b))
    if rng.is_one_in(8):
        rows[-1] = (row[0], -1)
    return {"window": (None, None), "window_arrays": tuple(rows)}


_NOT_WITH_A_CACHE = ("mask", "bias", "window_arrays", "q_segments", "cu_q", "mask_mod")
"""Fields of calls that do not become calls with a cache."""


def _cache(rng: SeededRandom, facts: Facts, sizes: Sizes) -> Facts:
    """Some calls as in serving: a few queries and a cache, which is mostly in pages."""
    if any(facts.get(x) is not None for x in _NOT_WITH_A_CACHE) or not rng.is_one_in(2):
        return {}
    pages = (1, 2, 4, 8, 16, 16, 32, 64, 64, 128, 256) if max(sizes.lengths) > 64 else (1, 2, 4)
    page = rng.one_of(pages)
    if rng.is_one_in(12):
        page += 1  # a page size need not be a power of two
    most = max(sizes.lengths) * (4 if max(sizes.lengths) > 64 else 1)
    s = page * rng.between(1, max(most // page, 1))
    t = rng.one_of((1, 1, 1, 1, 2, 3, 4, 5, 8, 9, 33) if most > 64 else (1, 1, 2, 4, 9))
    b = facts["b"]
    cache: Facts = {"t": t, "s": s, "inference": True, "dropout": 0.0, "dropout_keys": 1}
    cache |= {"kv_lengths": tuple(any_length(rng, s) for _ in range(b)), "q_lengths": None}
    cache |= {
        "is_causal": not rng.is_one_in(4),
        "alignment": "bottom_right",
        "window": (None, None),
    }
    cache |= {"deterministic": False, "lse_grad": False, "needs_max": rng.is_one_in(12)}
    if rng.is_one_in(4):
        cache["q_lengths"] = tuple(any_length(rng, t) for _ in range(b))
    if rng.is_one_in(4):
        cache["window"] = (rng.up_to(s // 2), 0)
    if not rng.is_one_in(2):
        cache |= {"score_mod": (), "soft_cap": None, "alibi": None}  # a plain call
    if not rng.is_one_in(4):
        cache["page"] = page
        if facts["transform"] not in ("vmap", "scan") and rng.is_one_in(3):
            cache["shared_pages"] = rng.between(1, s // page)
    return cache


def orders(rng: SeededRandom, facts: Facts) -> Facts:
    """The order of some arrays in memory."""
    found: Facts = {}
    if rng.is_one_in(3):
        found["heads_first"] = rng.one_of(("q kv", "q kv", "q", "kv"))
    if facts.get("page") and facts["h"] == facts["v"] and rng.is_one_in(3):
        found["one_pool"] = True
    return found


_LARGEST_SCALE = 1
"""The largest scale with a score_mod, whose steps expect scores of moderate size."""


def _mods(rng: SeededRandom, facts: Facts) -> Facts:
    """A score_mod, a mask_mod or both, in a quarter of the calls."""
    moved = {"score_shift", "magnitude"} & facts.keys()
    is_extreme = moved or abs(facts["scale"]) > _LARGEST_SCALE
    which = rng.one_of(("both", "score", "mask")) if rng.is_one_in(4) else ""
    mods: Facts = {}
    if which in ("both", "score") and not is_extreme:
        is_of_the_past = facts["is_causal"] and facts["alignment"] == "top_left"
        mods["score_mod"] = steps(rng, is_of_the_past)
    if which in ("both", "mask"):
        mods["mask_mod"] = (rng.one_of(tuple(MASKS)), rng.between(1, 100))
    if mods and facts["transform"] in ("vmap", "scan"):
        mods["own_arrays"] = rng.is_one_in(2)
    if mods and rng.is_one_in(2):
        mods["mods_start"] = (rng.up_to(3), rng.up_to(3))
    if "score_mod" in mods and rng.is_one_in(4):
        (first, *_) = mods["score_mod"]
        mods["score_mod"] = (first._replace(formula=rng.one_of(tuple(ALONE)), x=0, read="n"),)
    return mods


def steps(rng: SeededRandom, is_of_the_past: bool) -> tuple[Step, ...]:
    """3 to 20 steps, with `is_of_the_past` also ones that are NaN for keys after the query."""
    # An array that is read at t has an entry for each query, and backward passes take few of these.
    readable = ("n", "s", "b", "t") if rng.is_one_in(3) else ("n", "n", "b")
    formulas = tuple(x for x in FORMULAS if is_of_the_past or x not in OF_THE_PAST)
    return tuple(
        Step(
            formula=rng.one_of(formulas),
            x=rng.up_to(i),
            y=rng.up_to(i),
            c=rng.between(4, 32) / 16,
            w=rng.between(8, 64),
            read=rng.one_of(readable),
        )
        for i in range(rng.between(3, 20))
    )


def dense_shape(rng: SeededRandom, b: int, n: int, t: int, s: int) -> tuple[int, ...]:
    """The shape of a mask or a bias, each axis of which may be 1."""
    letters = {"1": 1, "b": b, "n": n, "t": t, "s": s}
    return tuple(letters[x] for x in rng.one_of(_SHAPES))


def _scores(
    rng: SeededRandom, b: int, n: int, t: int, s: int, h: int, dtype: str, layout: str
) -> Facts:
    """Options that change scores."""
    usual = 1 / math.sqrt(h)
    scale = rng.one_of((usual, usual, usual, 0.3, 0.0, -usual, -0.3, 1e-6, 1e-30, 4.0))
    facts: Facts = {"scale": scale}
    if layout != "ragged" and rng.is_one_in(6):
        facts["bias"] = dense_shape(rng, b, n, t, s)
        facts["bias_dtype"] = rng.one_of(("float32", dtype))
        facts["infinite_bias"] = facts["bias"][2] > 1 and rng.is_one_in(2)
    for name in ("alibi", "sinks"):
        if rng.is_one_in(5):
            facts[name] = rng.one_of((1, 1, 1, b))
    if rng.is_one_in(5):
        facts["soft_cap"] = rng.one_of((2.0, 30.0))
    elif rng.is_one_in(4) and 1e-3 < abs(scale) < 1:
        extremes: tuple[Facts, ...] = (
            {"score_shift": -150.0}, {"score_shift": 300.0}, {"magnitude": 5.0},
            {"magnitude": 0.01},
        )  # fmt: skip
        facts |= rng.one_of(extremes)
    return facts


def _dropout_and_results(rng: SeededRandom, b: int, transform: Transform) -> Facts:
    """Dropout, determinism, and which results and gradients the call has."""
    facts: Facts = {"deterministic": rng.is_one_in(5)}
    if rng.is_one_in(5):
        facts["dropout"] = rng.one_of((0.1, 0.5))
        if transform not in ("vmap", "scan"):
            facts["dropout_keys"] = rng.one_of((1, 1, 1, b))
    if rng.is_one_in(5):
        return facts | {"inference": True, "needs_max": rng.is_one_in(5)}
    return facts | {"lse_grad": rng.is_one_in(4), "needs_max": rng.is_one_in(6)}
