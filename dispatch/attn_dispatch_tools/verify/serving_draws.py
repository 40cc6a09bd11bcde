"""Calls of serving drawn at random: decoding, drafts, chunks of prompts and mixes of them.

Beside the choices of draws.py there are: pages of any size in any order, shared pages, NaN in pages
of no row, invalid page numbers past a length, lengths near the ends of pages, and packed queries.
"""

from __future__ import annotations

import math

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.draws import KERNELS, Facts, Sizes, any_length, orders, steps
from attn_dispatch_tools.verify.seeded_random import SeededRandom

_KINDS = ("decode", "decode", "decode", "few", "few", "chunk", "ragged", "ragged", "ragged")
_TRANSFORMS = ("jit", "jit", "jit", "jit", "vmap", "scan", "eager", "donate")
_PAGES = (0, 1, 2, 3, 4, 8, 8, 16, 16, 24, 32, 40, 64, 64, 96, 128, 256, 512, 1024)
"""Page sizes; 0: a contiguous cache."""
_SMALL_PAGES = (0, 1, 2, 3, 4, 8)
_HEADS = ((4, 2), (4, 4), (4, 1), (8, 2), (16, 1), (6, 3), (20, 4))


def serving_examples(count: int, seed: int, sizes: Sizes = KERNELS) -> list[Case]:
    """`count` cases, the same for the same seed and sizes everywhere.

    A larger count adds cases at the end.
    """
    return [
        _case(f"served/{seed}_{i}", SeededRandom(f"served/{seed}/{i}"), sizes) for i in range(count)
    ]


def _case(name: str, rng: SeededRandom, sizes: Sizes) -> Case:
    is_small = max(sizes.lengths) <= 64
    kind = rng.one_of(_KINDS)
    transform = rng.one_of(_TRANSFORMS)
    if kind == "ragged" and transform in ("vmap", "scan", "eager"):
        transform = "jit"
    b = rng.one_of((2, 4)) if transform in ("vmap", "scan") else rng.between(1, 6)
    n, k = rng.one_of(sizes.heads if is_small else _HEADS)
    h = rng.one_of(sizes.head_dims)
    v = rng.one_of(sizes.value_dims) if rng.is_one_in(6) else h
    page = rng.one_of(_SMALL_PAGES if is_small else _PAGES)
    if kind == "ragged":
        page = page or 16
    most = 40 if is_small else 1300
    s = max(page, 1) * rng.between(1, max(most // max(page, 1), 1))
    facts: Facts = {
        "b": b, "n": n, "k": k, "h": h, "v": v, "s": s, "page": page,
        "dtype": rng.one_of(sizes.dtypes), "transform": transform,
        "inference": True, "alignment": "bottom_right", "is_causal": not rng.is_one_in(5),
        "mixed_poison": rng.is_one_in(2),
        "kv_lengths": tuple(_keys(rng, s, page) for _ in range(b)),
    }  # fmt: skip
    facts |= _queries(rng, kind, b, is_small)
    facts |= _scores(rng, b, h, s, kind)
    if page and transform not in ("vmap", "scan") and rng.is_one_in(4):
        facts["shared_pages"] = rng.between(1, s // page)
    if kind != "ragged":
        facts["needs_max"] = rng.is_one_in(16)
    return Case(name, **facts | orders(SeededRandom(f"{name}/orders"), facts))


def _keys(rng: SeededRandom, s: int, page: int) -> int:
    """A number of keys, often near the end of a page."""
    if not page or rng.is_one_in(2):
        return any_length(rng, s)
    near = page * rng.between(0, s // page) + rng.one_of((-1, 0, 1))
    return min(max(near, 0), s)


def _queries(rng: SeededRandom, kind: str, b: int, is_small: bool) -> Facts:
    """t, and the queries' lengths if there are any."""
    few = (2, 3, 4, 5, 8, 12, 16)
    chunks = (17, 19, 23, 33) if is_small else (17, 33, 64, 65, 100, 129, 200, 300)
    if kind == "ragged":
        lengths = [rng.one_of((0, 1, 1, 1, rng.one_of(few), rng.one_of(chunks))) for _ in "b" * b]
        longest = max(*lengths, 1) + rng.one_of((0, 0, 5))
        return {"t": longest, "q_lengths": tuple(lengths), "ragged": True}
    t = {"decode": 1, "few": rng.one_of(few), "chunk": rng.one_of(chunks)}[kind]
    if rng.is_one_in(3):
        return {"t": t, "q_lengths": tuple(any_length(rng, t) for _ in range(b))}
    return {"t": t}


def _scores(rng: SeededRandom, b: int, h: int, s: int, kind: str) -> Facts:
    usual = 1 / math.sqrt(h)
    facts: Facts = {"scale": rng.one_of((usual, usual, usual, 0.3, -usual, 0.0))}
    if rng.is_one_in(4):
        facts["window"] = (rng.up_to(s), 0)
        if not facts["window"][0] or rng.is_one_in(6):
            facts |= {"window": (rng.up_to(s), rng.up_to(4)), "is_causal": False}
    if rng.is_one_in(4):
        facts["soft_cap"] = rng.one_of((2.0, 30.0))
    elif facts["scale"] and rng.is_one_in(5):
        facts |= rng.one_of(({"score_shift": -150.0}, {"score_shift": 200.0}, {"magnitude": 4.0}))
    for name in ("alibi", "sinks"):
        if rng.is_one_in(4):
            facts[name] = rng.one_of((1, 1, b))
    is_extreme = {"score_shift", "magnitude"} & facts.keys()
    if kind != "ragged" and not is_extreme and rng.is_one_in(6):
        facts["score_mod"] = steps(rng, is_of_the_past=False)
        if rng.is_one_in(2):  # a sum
            facts["score_mod"] = (
                facts["score_mod"][0]._replace(formula="r tanh((t - s) / 16)", x=0, read="n"),
            )
    return facts
