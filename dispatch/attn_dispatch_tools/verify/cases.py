"""The table of cases, the same for every implementation."""

from __future__ import annotations

from itertools import chain
from typing import Any

from attn_dispatch_tools.verify import (
    cache_cases,
    found_cases,
    further_cases,
    masked_cases,
    scored_cases,
    wide_cases,
)
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.layout_cases import reordered
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT as _BOTTOM_RIGHT
from attn_dispatch_tools.verify.sizes import CAUSAL as _CAUSAL
from attn_dispatch_tools.verify.sizes import case


def _case(name: str, **facts: Any) -> Case:
    return case(f"shapes/{name}", **{"n": 8} | facts)


KERNEL_CASES: tuple[Case, ...] = (
    *(
        _case(f"{dtype}_d{h}_{mask}", h=h, dtype=dtype, t=384, s=384, **options)
        for dtype in ("float16", "bfloat16")
        for h in (64, 128, 256)
        for mask, options in (("full", {}), ("causal", _CAUSAL))
    ),
    *(_case(f"padded_d{h}", h=h, **_CAUSAL) for h in (3, 8, 20, 40, 60, 72, 80, 96, 100, 192)),
    _case("value_narrower", h=192, v=128, **_CAUSAL),
    _case("value_half", h=128, v=64),
    _case("value_wider", h=64, v=128, **_CAUSAL),
    _case("value_odd", h=50, v=30),
    _case("no_groups", k=8, **_CAUSAL),
    _case("one_kv_head", k=1, **_CAUSAL),
    _case("smollm2_heads", n=9, k=3, **_CAUSAL),
    _case("seven_heads", n=7, k=7),
    _case("batch_of_five", b=5, t=128, s=128),
    _case("cross_full", t=256, s=512),
    _case("cross_causal", t=256, s=512, **_CAUSAL),
    _case("cross_bottom_right", t=256, s=512, **_BOTTOM_RIGHT),
    _case("cross_bottom_right_odd", t=100, s=333, **_BOTTOM_RIGHT),
    _case("more_queries_full", t=512, s=256),
    _case("more_queries_causal", t=512, s=256, **_CAUSAL),
    _case("more_queries_bottom_right", t=512, s=256, **_BOTTOM_RIGHT),
    _case("equal_bottom_right", **_BOTTOM_RIGHT),
    _case("decode", t=1, s=512),
    _case("decode_bottom_right", t=1, s=500, **_BOTTOM_RIGHT),
    _case("one_key", t=256, s=1),
    _case("short_odd", t=33, s=17),
    _case("long_odd", b=1, n=4, t=1000, s=777),
    _case("odd_causal", b=1, n=4, t=777, s=777, **_CAUSAL),
    # Some of cuDNN's bugs occur only at key lengths of 64 modulo 128, or at one query:
    # known_bad.cc.
    _case("half_tile_full", t=192, s=192),
    _case("half_tile_causal", t=192, s=192, **_CAUSAL),
    _case("half_tile_small", t=64, s=64),
    _case("large_scores", magnitude=12.0),
    _case("large_scores_f16", magnitude=8.0, dtype="float16", **_CAUSAL),
    _case("negative_scores", score_shift=-200.0),
    _case("negative_scores_causal", score_shift=-200.0, **_CAUSAL),
    _case("negative_scores_half_tile", t=192, s=192, score_shift=-200.0),
    _case("negative_scores_half_tile_causal", t=192, s=192, score_shift=-200.0, **_CAUSAL),
    _case("negative_scores_half_tile_more_queries", t=256, s=192, score_shift=-200.0, **_CAUSAL),
    _case("negative_scores_half_tile_cross", t=100, s=320, score_shift=-200.0, **_BOTTOM_RIGHT),
    _case("negative_scores_decode", t=1, s=128, n=2, k=2, score_shift=-200.0),
    _case("negative_scores_odd", b=1, t=200, s=777, score_shift=-200.0),
    _case("everything_one", b=1, t=1, s=128, n=1, k=1),
)


_TABLES = (
    KERNEL_CASES,
    masked_cases.PLAIN,
    masked_cases.WINDOWS,
    masked_cases.LENGTHS,
    masked_cases.MASKS,
    masked_cases.PACKED,
    masked_cases.RAGGED,
    scored_cases.BIASES,
    scored_cases.ALIBI,
    scored_cases.SOFT_CAPS,
    scored_cases.SINKS,
    scored_cases.EXTREMES,
    further_cases.DROPOUT,
    further_cases.LSE_GRADIENTS,
    further_cases.ROW_MAXIMA,
    further_cases.DETERMINISTIC,
    further_cases.ONE_QUERY_CASES,
    further_cases.INFERENCE,
    further_cases.TRANSFORMS,
    further_cases.COMBINATIONS,
    cache_cases.CACHE,
)

CASES: tuple[Case, ...] = (
    *chain.from_iterable(_TABLES),
    *reordered(_TABLES),
    *found_cases.FOUND,
    *wide_cases.WIDE_HEADS,
)
"""All cases, in float16 and bfloat16, at sizes that kernels are made for."""

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
