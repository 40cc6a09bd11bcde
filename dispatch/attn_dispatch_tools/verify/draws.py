"""Cases drawn at random: shapes, dtypes, layouts, masks, scores and transforms all at once.

What is drawn is likely to be what nobody would write down: scales of 0 and below, one query, one
key, sequences without a key, value dims of any size, rows of which none attends, scores of some
hundred, Inf beside NaN in padding, gradients of some operands alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from attn_dispatch_tools.verify.case import Case, Transform
from attn_dispatch_tools.verify.dice import Dice
from attn_dispatch_tools.verify.drawn_mods import ALONE, FORMULAS, MASKS, OF_THE_PAST, Step

Facts = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What sizes are drawn from; a size named twice is twice as likely."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    """Beside the head dim itself, its half and its double."""
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
    """That many cases, the same ones for the same seed and sizes everywhere.

    More of them begin with fewer of them.
    """
    return [_case(f"drawn/{seed}_{i}", Dice(f"{seed}/{i}"), sizes) for i in range(count)]


def _case(name: str, dice: Dice, sizes: Sizes) -> Case:
    transform = dice.one_of(_TRANSFORMS)
    b = dice.one_of((2, 4)) if transform in ("vmap", "scan") else dice.between(1, 3)
    t, s = dice.one_of(sizes.lengths), dice.one_of(sizes.lengths)
    n, k = dice.one_of(sizes.heads)
    h = dice.one_of(sizes.head_dims)
    other_dims = (max(h // 2, 1), min(2 * h, 256), *sizes.value_dims)
    v = h if dice.in_one_of(2) else dice.one_of(other_dims)
    dtype = dice.one_of(sizes.dtypes)
    layout = dice.one_of(_LAYOUTS)
    facts: Facts = {"b": b, "t": t, "s": s, "n": n, "k": k, "h": h, "v": v, "dtype": dtype}
    facts |= {"transform": transform, "mixed_poison": dice.in_one_of(2)}
    facts |= _LAYOUT[layout](dice, b, t, s)
    facts |= _who(dice, b, n, t, s, layout)
    facts |= _scores(dice, b, n, t, s, h, dtype, layout)
    facts |= _asked_for(dice, b, transform)
    # Of dice of its own: it came later, and the rest of the case is what it was.
    facts |= _traced_window(Dice(f"{name}/window"), b, facts)
    facts |= _mods(Dice(f"{name}/mods"), facts)
    facts |= _cache(Dice(f"{name}/cache"), facts, sizes)
    facts |= orders(Dice(f"{name}/orders"), facts)
    case = Case(name, **facts)
    if not case.inference and dice.in_one_of(3):
        facts["wanted"] = dice.some_of(case.differentiable)
    return Case(name, **facts)


def _plain(dice: Dice, b: int, t: int, s: int) -> Facts:
    return {}


def _lengths(dice: Dice, b: int, t: int, s: int) -> Facts:
    which = dice.one_of((("q_lengths",), ("kv_lengths",), ("q_lengths", "kv_lengths")))
    full = {"q_lengths": t, "kv_lengths": s}
    return {name: tuple(any_length(dice, full[name]) for _ in range(b)) for name in which}


def _length(dice: Dice, full: int) -> int:
    """Often none, or one, or all."""
    return min(full, dice.one_of((0, 1, full, *(dice.up_to(full) for _ in range(4)))))


def any_length(dice: Dice, full: int) -> int:
    """Also one that is wrong, and makes its batch row NaN where no one can look at it."""
    return dice.one_of((-2, full + 3)) if dice.in_one_of(12) else _length(dice, full)


def _packed(dice: Dice, b: int, t: int, s: int) -> Facts:
    rows_q = tuple(_ids(dice, t) for _ in range(b))
    same = t == s and dice.in_one_of(2)
    rows_kv = rows_q if same else tuple(_ids(dice, s) for _ in range(b))
    most = dice.one_of((None, 4, 6, 6, 6, 6))
    return {"q_segments": rows_q, "kv_segments": rows_kv, "max_segments": most}


def _ids(dice: Dice, length: int) -> tuple[int, ...]:
    """Ascending ids from 1 to 6, with padding anywhere between them; any may be missing."""
    ids: list[int] = []
    for document in range(1, 7):
        room = length - len(ids)
        ids += [0] * min(room, dice.one_of((0, 0, 0, 2)))
        room = length - len(ids)
        ids += [document] * (dice.up_to(room // 2 + 1) if room else 0)
    return tuple((ids + [0] * length)[:length])


def _ragged(dice: Dice, b: int, t: int, s: int) -> Facts:
    sequences = dice.between(1, 4)
    q, kv = (
        tuple((0, *sorted(_length(dice, length) for _ in range(sequences))) for _ in range(b))
        for length in (t, s)
    )
    longest = tuple(max(1, *(y - x for row in rows for x, y in pairwise(row))) for rows in (q, kv))
    return {"cu_q": q, "cu_kv": kv, "longest": longest}


_LAYOUT = {"plain": _plain, "lengths": _lengths, "packed": _packed, "ragged": _ragged}


def _who(dice: Dice, b: int, n: int, t: int, s: int, layout: str) -> Facts:
    """Who may attend to whom."""
    facts: Facts = {
        "is_causal": dice.in_one_of(2),
        "alignment": dice.one_of(("top_left", "top_left", "bottom_right")),
    }
    if dice.in_one_of(3):
        sides = (None, 0, 1, dice.up_to(max(t, s)), dice.up_to(max(t, s)))
        facts["window"] = (dice.one_of(sides), dice.one_of(sides))
    if layout != "ragged" and dice.in_one_of(6):
        facts["mask"] = _shape(dice, b, n, t, s)
        facts["dead_rows"] = dice.in_one_of(2)
    return facts


def _traced_window(dice: Dice, b: int, facts: Facts) -> Facts:
    """Some windows as an array, one for all batch rows or one for each, seldom a wrong one."""
    sides = facts.get("window", (None, None))
    if sides == (None, None) or not dice.in_one_of(4):
        return {}
    row = tuple(_OPEN if side is None else side for side in sides)
    rows = [row] * dice.one_of((1, b))
    if dice.in_one_of(8):
        rows[-1] = (row[0], -1)
    return {"window": (None, None), "window_arrays": tuple(rows)}


_BY_PAIR = ("mask", "bias", "window_arrays", "q_segments", "cu_q", "mask_mod")


def _cache(dice: Dice, facts: Facts, sizes: Sizes) -> Facts:
    """Some calls as those of serving: few queries beside a cache, most of them in pages."""
    if any(facts.get(x) is not None for x in _BY_PAIR) or not dice.in_one_of(2):
        return {}
    pages = (1, 2, 4, 8, 16, 16, 32, 64, 64, 128, 256) if max(sizes.lengths) > 64 else (1, 2, 4)
    page = dice.one_of(pages)
    if dice.in_one_of(12):
        page += 1  # of which not all are powers of two
    most = max(sizes.lengths) * (4 if max(sizes.lengths) > 64 else 1)
    s = page * dice.between(1, max(most // page, 1))
    t = dice.one_of((1, 1, 1, 1, 2, 3, 4, 5, 8, 9, 33) if most > 64 else (1, 1, 2, 4, 9))
    b = facts["b"]
    cache: Facts = {"t": t, "s": s, "inference": True, "dropout": 0.0, "dropout_keys": 1}
    cache |= {"kv_lengths": tuple(any_length(dice, s) for _ in range(b)), "q_lengths": None}
    cache |= {
        "is_causal": not dice.in_one_of(4),
        "alignment": "bottom_right",
        "window": (None, None),
    }
    cache |= {"deterministic": False, "lse_grad": False, "needs_max": dice.in_one_of(12)}
    if dice.in_one_of(4):
        cache["q_lengths"] = tuple(any_length(dice, t) for _ in range(b))
    if dice.in_one_of(4):
        cache["window"] = (dice.up_to(s // 2), 0)
    if not dice.in_one_of(2):
        cache |= {"score_mod": (), "soft_cap": None, "alibi": None}  # a plain call
    if not dice.in_one_of(4):
        cache["page"] = page
        if facts["transform"] not in ("vmap", "scan") and dice.in_one_of(3):
            cache["shared_pages"] = dice.between(1, s // page)
    return cache


def orders(dice: Dice, facts: Facts) -> Facts:
    """In which order some arrays lie in memory."""
    found: Facts = {}
    if dice.in_one_of(3):
        found["heads_first"] = dice.one_of(("q kv", "q kv", "q", "kv"))
    if facts.get("page") and facts["h"] == facts["v"] and dice.in_one_of(3):
        found["one_pool"] = True
    return found


_LARGEST_SCALE = 1
"""With a score_mod, whose steps are for scores of moderate size."""


def _mods(dice: Dice, facts: Facts) -> Facts:
    """In a quarter of the calls a score_mod, a mask_mod or both."""
    moved = {"score_shift", "magnitude"} & facts.keys()
    is_extreme = moved or abs(facts["scale"]) > _LARGEST_SCALE
    which = dice.one_of(("both", "score", "mask")) if dice.in_one_of(4) else ""
    mods: Facts = {}
    if which in ("both", "score") and not is_extreme:
        is_of_the_past = facts["is_causal"] and facts["alignment"] == "top_left"
        mods["score_mod"] = steps(dice, is_of_the_past)
    if which in ("both", "mask"):
        mods["mask_mod"] = (dice.one_of(tuple(MASKS)), dice.between(1, 100))
    if mods and facts["transform"] in ("vmap", "scan"):
        mods["own_arrays"] = dice.in_one_of(2)
    if mods and dice.in_one_of(2):
        mods["mods_start"] = (dice.up_to(3), dice.up_to(3))
    if "score_mod" in mods and dice.in_one_of(4):
        (first, *_) = mods["score_mod"]
        mods["score_mod"] = (first._replace(formula=dice.one_of(tuple(ALONE)), x=0, read="n"),)
    return mods


def steps(dice: Dice, is_of_the_past: bool) -> tuple[Step, ...]:
    """3 to 20 steps, some of which may be NaN for keys that come after the query."""
    # An entry for each query is a row of its own, of which a backward pass takes few.
    readable = ("n", "s", "b", "t") if dice.in_one_of(3) else ("n", "n", "b")
    formulas = tuple(x for x in FORMULAS if is_of_the_past or x not in OF_THE_PAST)
    return tuple(
        Step(
            formula=dice.one_of(formulas),
            x=dice.up_to(i),
            y=dice.up_to(i),
            c=dice.between(4, 32) / 16,
            w=dice.between(8, 64),
            read=dice.one_of(readable),
        )
        for i in range(dice.between(3, 20))
    )


def _shape(dice: Dice, b: int, n: int, t: int, s: int) -> tuple[int, ...]:
    letters = {"1": 1, "b": b, "n": n, "t": t, "s": s}
    return tuple(letters[x] for x in dice.one_of(_SHAPES))


def _scores(dice: Dice, b: int, n: int, t: int, s: int, h: int, dtype: str, layout: str) -> Facts:
    """What becomes of the scores."""
    usual = 1 / math.sqrt(h)
    scale = dice.one_of((usual, usual, usual, 0.3, 0.0, -usual, -0.3, 1e-6, 1e-30, 4.0))
    facts: Facts = {"scale": scale}
    if layout != "ragged" and dice.in_one_of(6):
        facts["bias"] = _shape(dice, b, n, t, s)
        facts["bias_dtype"] = dice.one_of(("float32", dtype))
        facts["infinite_bias"] = facts["bias"][2] > 1 and dice.in_one_of(2)
    for name in ("alibi", "sinks"):
        if dice.in_one_of(5):
            facts[name] = dice.one_of((1, 1, 1, b))
    if dice.in_one_of(5):
        facts["soft_cap"] = dice.one_of((2.0, 30.0))
    elif dice.in_one_of(4) and 1e-3 < abs(scale) < 1:
        extremes: tuple[Facts, ...] = (
            {"score_shift": -150.0}, {"score_shift": 300.0}, {"magnitude": 5.0},
            {"magnitude": 0.01},
        )  # fmt: skip
        facts |= dice.one_of(extremes)
    return facts


def _asked_for(dice: Dice, b: int, transform: Transform) -> Facts:
    facts: Facts = {"deterministic": dice.in_one_of(5)}
    if dice.in_one_of(5):
        facts["dropout"] = dice.one_of((0.1, 0.5))
        if transform not in ("vmap", "scan"):
            facts["dropout_keys"] = dice.one_of((1, 1, 1, b))
    if dice.in_one_of(5):
        return facts | {"inference": True, "needs_max": dice.in_one_of(5)}
    return facts | {"lse_grad": dice.in_one_of(4), "needs_max": dice.in_one_of(6)}
