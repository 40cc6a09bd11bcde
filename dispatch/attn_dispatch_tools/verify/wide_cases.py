"""Calls with head dims beyond 256: some by name, and drawn ones, most of them without a mask."""

from __future__ import annotations

import math

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.seeded_random import SeededRandom
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Facts, case

_BY_NAME: dict[str, Facts] = {
    **{
        f"{dtype}_d{h}_{mask}": {"h": h, "dtype": dtype, **options}
        for dtype, h in (("bfloat16", 512), ("float16", 512), ("bfloat16", 320), ("float16", 384))
        for mask, options in (("full", {}), ("causal", CAUSAL))
    },
    "padded": {"h": 259, "v": 300, **CAUSAL},
    "value_narrower": {"h": 320, "v": 64},
    "more_queries_bottom_right": {"h": 512, "t": 320, "s": 192, "lse_grad": True, **BOTTOM_RIGHT},
    "more_keys_bottom_right": {"h": 512, "t": 100, "s": 333, "lse_grad": True, **BOTTOM_RIGHT},
    "more_keys_top_left": {"h": 448, "t": 128, "s": 320, "k": 4, "lse_grad": True, **CAUSAL},
    "deterministic": {"h": 512, "k": 1, "deterministic": True, **CAUSAL},
    "negative_scores": {"h": 512, "score_shift": -200.0, **CAUSAL},
    "window": {"h": 512, "window": (60, None), **CAUSAL},
}

WIDE_HEADS: tuple[Case, ...] = tuple(
    case(f"wide_heads/{name}", **facts) for name, facts in _BY_NAME.items()
)

_LENGTHS = (1, 33, 64, 100, 128, 129, 192, 256, 300, 320)
_HEAD_DIMS = (512, 512, 320, 384, 257, 264, 272, 300, 448, 504)
_HEADS = ((4, 2), (4, 4), (4, 1), (3, 3))
_TRANSFORMS = ("jit", "jit", "jit", "jit", "vmap", "scan", "checkpoint", "eager")


def wide_examples(count: int, seed: int) -> list[Case]:
    """`count` cases, the same for the same seed everywhere.

    A larger count adds cases at the end.
    """
    return [_drawn(f"wide_draw/{seed}_{i}", SeededRandom(f"wide/{seed}/{i}")) for i in range(count)]


def _drawn(name: str, rng: SeededRandom) -> Case:
    transform = rng.one_of(_TRANSFORMS)
    t = rng.one_of(_LENGTHS)
    n, k = rng.one_of(_HEADS)
    h = rng.one_of(_HEAD_DIMS)
    facts: Facts = {
        "b": rng.one_of((2, 4)) if transform in ("vmap", "scan") else rng.between(1, 3),
        "t": t, "s": t if rng.is_one_in(2) else rng.one_of(_LENGTHS), "n": n, "k": k, "h": h,
        "v": rng.one_of((64, 256, 280)) if rng.is_one_in(8) else h, "transform": transform,
        "dtype": rng.one_of(("float16", "bfloat16")),
        "scale": rng.one_of((1 / math.sqrt(h),) * 4 + (0.1, -0.1)),
        "is_causal": rng.is_one_in(2), "alignment": rng.one_of(("top_left", "bottom_right")),
        "lse_grad": rng.is_one_in(2), "deterministic": rng.is_one_in(4),
        "inference": rng.is_one_in(8),
    }  # fmt: skip
    if rng.is_one_in(6):
        facts["window"] = (None, rng.up_to(40))
    return Case(name, **facts)
