"""Calls of serving drawn at random: decoding, drafts, chunks of prompts and mixes of them.

Beside what draws.py draws of other calls: pages of any size in any order, shared, NaN in those that
are nobody's, ids that are no pages past a length, lengths about the ends of pages, and queries that
lie one after the other.
"""

from __future__ import annotations

import math

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.dice import Dice
from attn_dispatch_tools.verify.draws import KERNELS, Facts, Sizes, any_length, orders, steps

_KINDS = ("decode", "decode", "decode", "few", "few", "chunk", "ragged", "ragged", "ragged")
_TRANSFORMS = ("jit", "jit", "jit", "jit", "vmap", "scan", "eager", "donate")
_PAGES = (0, 1, 2, 3, 4, 8, 8, 16, 16, 24, 32, 40, 64, 64, 96, 128, 256, 512, 1024)
"""0: not in pages."""
_SMALL_PAGES = (0, 1, 2, 3, 4, 8)
_HEADS = ((4, 2), (4, 4), (4, 1), (8, 2), (16, 1), (6, 3), (20, 4))


def serving_examples(count: int, seed: int, sizes: Sizes = KERNELS) -> list[Case]:
    """That many cases, the same ones for the same seed and sizes everywhere.

    More of them begin with fewer of them.
    """
    return [_case(f"served/{seed}_{i}", Dice(f"served/{seed}/{i}"), sizes) for i in range(count)]


def _case(name: str, dice: Dice, sizes: Sizes) -> Case:
    is_small = max(sizes.lengths) <= 64
    kind = dice.one_of(_KINDS)
    transform = dice.one_of(_TRANSFORMS)
    if kind == "ragged" and transform in ("vmap", "scan", "eager"):
        transform = "jit"
    b = dice.one_of((2, 4)) if transform in ("vmap", "scan") else dice.between(1, 6)
    n, k = dice.one_of(sizes.heads if is_small else _HEADS)
    h = dice.one_of(sizes.head_dims)
    v = dice.one_of(sizes.value_dims) if dice.in_one_of(6) else h
    page = dice.one_of(_SMALL_PAGES if is_small else _PAGES)
    if kind == "ragged":
        page = page or 16
    most = 40 if is_small else 1300
    s = max(page, 1) * dice.between(1, max(most // max(page, 1), 1))
    facts: Facts = {
        "b": b, "n": n, "k": k, "h": h, "v": v, "s": s, "page": page,
        "dtype": dice.one_of(sizes.dtypes), "transform": transform,
        "inference": True, "alignment": "bottom_right", "is_causal": not dice.in_one_of(5),
        "mixed_poison": dice.in_one_of(2),
        "kv_lengths": tuple(_keys(dice, s, page) for _ in range(b)),
    }  # fmt: skip
    facts |= _queries(dice, kind, b, is_small)
    facts |= _scores(dice, b, h, s, kind)
    if page and transform not in ("vmap", "scan") and dice.in_one_of(4):
        facts["shared_pages"] = dice.between(1, s // page)
    if kind != "ragged":
        facts["needs_max"] = dice.in_one_of(16)
    return Case(name, **facts | orders(Dice(f"{name}/orders"), facts))


def _keys(dice: Dice, s: int, page: int) -> int:
    """Any length, often one about the end of a page."""
    if not page or dice.in_one_of(2):
        return any_length(dice, s)
    near = page * dice.between(0, s // page) + dice.one_of((-1, 0, 1))
    return min(max(near, 0), s)


def _queries(dice: Dice, kind: str, b: int, is_small: bool) -> Facts:
    """t, and the lengths if there are any."""
    few = (2, 3, 4, 5, 8, 12, 16)
    chunks = (17, 19, 23, 33) if is_small else (17, 33, 64, 65, 100, 129, 200, 300)
    if kind == "ragged":
        lengths = [
            dice.one_of((0, 1, 1, 1, dice.one_of(few), dice.one_of(chunks))) for _ in "b" * b
        ]
        longest = max(*lengths, 1) + dice.one_of((0, 0, 5))
        return {"t": longest, "q_lengths": tuple(lengths), "ragged": True}
    t = {"decode": 1, "few": dice.one_of(few), "chunk": dice.one_of(chunks)}[kind]
    if dice.in_one_of(3):
        return {"t": t, "q_lengths": tuple(any_length(dice, t) for _ in range(b))}
    return {"t": t}


def _scores(dice: Dice, b: int, h: int, s: int, kind: str) -> Facts:
    usual = 1 / math.sqrt(h)
    facts: Facts = {"scale": dice.one_of((usual, usual, usual, 0.3, -usual, 0.0))}
    if dice.in_one_of(4):
        facts["window"] = (dice.up_to(s), 0)
        if not facts["window"][0] or dice.in_one_of(6):
            facts |= {"window": (dice.up_to(s), dice.up_to(4)), "is_causal": False}
    if dice.in_one_of(4):
        facts["soft_cap"] = dice.one_of((2.0, 30.0))
    elif facts["scale"] and dice.in_one_of(5):
        facts |= dice.one_of(({"score_shift": -150.0}, {"score_shift": 200.0}, {"magnitude": 4.0}))
    for name in ("alibi", "sinks"):
        if dice.in_one_of(4):
            facts[name] = dice.one_of((1, 1, b))
    is_extreme = {"score_shift", "magnitude"} & facts.keys()
    if kind != "ragged" and not is_extreme and dice.in_one_of(6):
        facts["score_mod"] = steps(dice, is_of_the_past=False)
        if dice.in_one_of(2):  # a sum
            facts["score_mod"] = (
                facts["score_mod"][0]._replace(formula="r tanh((t - s) / 16)", x=0, read="n"),
            )
    return facts
