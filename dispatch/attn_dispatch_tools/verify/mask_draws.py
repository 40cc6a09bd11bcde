"""Calls with masks drawn at random, which kernels take as ranges of keys, as bits or not at all.

Beside the choices of draws.py there are: mask_mods that read ends of ranges, numbers of images or
bits, masks that differ by head, queries that see nothing, and lengths of several tiles. Scores have
few options, so that most calls are ones that kernels with any mask can run.
"""

from __future__ import annotations

import math

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_masks import DENSE, OTHERS, RANGES
from attn_dispatch_tools.verify.draws import LAYOUTS, Facts, Sizes, dense_shape, orders
from attn_dispatch_tools.verify.seeded_random import SeededRandom

KERNELS = Sizes(
    lengths=(1, 33, 64, 100, 127, 128, 129, 200, 256, 300, 384, 400),
    head_dims=(64, 64, 128, 128, 128, 96, 192, 256, 80),
    value_dims=(64, 128),
    heads=((4, 2), (4, 4), (4, 1), (3, 3)),
    dtypes=("float16", "bfloat16", "bfloat16"),
)
_TRANSFORMS = ("jit", "jit", "jit", "jit", "vmap", "scan", "checkpoint", "eager")
_KINDS = ("ranges", "ranges", "ranges", "others", "others", "dense", "arguments")
_LAYOUTS = ("plain", "plain", "plain", "lengths", "packed", "ragged")
_NOT_RAGGED = ("dense",)


def mask_examples(count: int, seed: int, sizes: Sizes = KERNELS) -> list[Case]:
    """`count` cases, the same for the same seed and sizes everywhere.

    A larger count adds cases at the end.
    """
    return [
        _case(f"masked_draw/{seed}_{i}", SeededRandom(f"masks/{seed}/{i}"), sizes)
        for i in range(count)
    ]


def _case(name: str, rng: SeededRandom, sizes: Sizes) -> Case:
    transform = rng.one_of(_TRANSFORMS)
    b = rng.one_of((2, 4)) if transform in ("vmap", "scan") else rng.between(1, 3)
    t = rng.one_of(sizes.lengths)
    s = t if rng.is_one_in(2) else rng.one_of(sizes.lengths)
    n, k = rng.one_of(sizes.heads)
    h = rng.one_of(sizes.head_dims)
    v = rng.one_of(sizes.value_dims) if rng.is_one_in(8) else h
    kind, layout = rng.one_of(_KINDS), rng.one_of(_LAYOUTS)
    if kind in _NOT_RAGGED and layout == "ragged":
        layout = "plain"
    facts: Facts = {
        "b": b, "t": t, "s": s, "n": n, "k": k, "h": h, "v": v, "dtype": rng.one_of(sizes.dtypes),
        "transform": transform, "mixed_poison": rng.is_one_in(2),
        "scale": rng.one_of((1 / math.sqrt(h),) * 4 + (0.3, -0.3)),
    }  # fmt: skip
    facts |= LAYOUTS[layout](rng, b, t, s)
    facts |= _causality(rng, t, s, kind)
    facts |= _mask(rng, kind, facts, sizes)
    facts |= _results(rng, b)
    facts |= orders(SeededRandom(f"{name}/orders"), facts)
    return Case(name, **facts)


def _causality(rng: SeededRandom, t: int, s: int, kind: str) -> Facts:
    """Causality and a window beside the mask: often where they are all of it, else seldom."""
    is_all = kind == "arguments"
    facts: Facts = {
        "is_causal": rng.is_one_in(2 if is_all else 4),
        "alignment": rng.one_of(("top_left", "bottom_right")),
    }
    if rng.is_one_in(2 if is_all else 8):
        sides = (None, 0, rng.up_to(max(t, s)), rng.up_to(max(t, s)))
        facts["window"] = (rng.one_of(sides), rng.one_of(sides))
    return facts


def _mask(rng: SeededRandom, kind: str, facts: Facts, sizes: Sizes) -> Facts:
    if kind == "arguments":
        return {}
    if kind == "dense":
        shape = dense_shape(rng, *(facts[x] for x in "bnts"))
        kinds = ("", *DENSE) if shape[2] > 1 and shape[3] > 1 else ("",)
        return {"mask": shape, "mask_kind": rng.one_of(kinds), "dead_rows": rng.is_one_in(2)}
    formula = rng.one_of(tuple(RANGES if kind == "ranges" else OTHERS))
    mask: Facts = {"mask_mod": (formula, rng.between(1, max(*sizes.lengths) // 3))}
    if facts["transform"] in ("vmap", "scan"):
        mask["own_arrays"] = rng.is_one_in(2)
    if rng.is_one_in(3):
        mask["mods_start"] = (rng.up_to(3), rng.up_to(3))
    return mask


def _results(rng: SeededRandom, b: int) -> Facts:
    """Which results and gradients the call has, and sinks in some."""
    facts: Facts = {"sinks": rng.one_of((1, b))} if rng.is_one_in(8) else {}
    if rng.is_one_in(6):
        return facts | {"inference": True}
    return facts | {"lse_grad": rng.is_one_in(4)}
