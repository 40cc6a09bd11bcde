"""Cases of AITER's kernels: every option that they run, at sizes that a CPU can compute.

ASM kernels begin at 129 queries and head dim 64; the smaller cases are CK's.
"""

from __future__ import annotations

from typing import Any

from attn_dispatch_tools.verify.case import Case


def _case(name: str, **facts: Any) -> Case:
    facts = {"b": 2, "t": 24, "s": 40, "n": 4, "k": 2, "h": 32, "dtype": "bfloat16"} | facts
    facts.setdefault("v", facts["h"])
    return Case(name, **({"scale": facts["h"] ** -0.5} | facts))


_CAUSAL: dict[str, Any] = {"is_causal": True}
_BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "bottom_right"}
_LENGTHS: dict[str, Any] = {"b": 4, "q_lengths": (24, 9, 0, 17), "kv_lengths": (33, 40, 12, 0)}
_ONE_ROW: dict[str, Any] = {
    # Sequences without queries, without keys and without both, and rows after the last sequence.
    "b": 1,
    "t": 48,
    "s": 56,
    "cu_q": ((0, 13, 13, 13, 30, 31, 44),),
    "cu_kv": ((0, 9, 16, 16, 41, 41, 52),),
    "longest": (17, 25),
}
_TWO_ROWS: dict[str, Any] = {
    "b": 2,
    "cu_q": ((0, 7, 7, 20), (0, 0, 15, 24)),
    "cu_kv": ((0, 11, 29, 29), (0, 8, 16, 40)),
    "longest": (15, 24),
}
_SEGMENTS: dict[str, Any] = {
    # Segments without queries, without keys and without both, with padding before and after.
    "b": 2,
    "max_segments": 5,
    "q_segments": (
        (0,) * 2 + (1,) * 7 + (3,) * 8 + (0,) + (4,) * 6,
        (1,) * 11 + (2,) * 12 + (0,),
    ),
    "kv_segments": (
        (1,) * 9 + (2,) * 4 + (0,) * 3 + (3,) * 15 + (5,) * 9,
        (2,) * 40,
    ),
}
_ASM: dict[str, Any] = {"b": 1, "t": 144, "s": 160, "n": 2, "k": 1, "h": 128}
_ASM_RAGGED: dict[str, Any] = {
    "b": 1, "t": 320, "s": 352, "n": 2, "k": 1, "h": 128,
    "cu_q": ((0, 130, 130, 290, 290),), "cu_kv": ((0, 140, 150, 300, 320),), "longest": (160, 150),
}  # fmt: skip

_PAGED: dict[str, Any] = {
    # A row ends inside a page, one ends with a page, and some pages belong to no row.
    "b": 3, "t": 1, "s": 384, "page": 128, "kv_lengths": (300, 0, 128), "inference": True,
}  # fmt: skip
_CACHE: dict[str, Any] = {"b": 3, "t": 1, "s": 200, "kv_lengths": (200, 0, 131)}

AITER_CASES: tuple[Case, ...] = (
    _case("full"),
    _case("full_f16", dtype="float16"),
    _case("no_groups", k=4),
    _case("one_kv_head", k=1),
    _case("causal", **_CAUSAL),
    _case("causal_more_queries", t=40, s=24, **_CAUSAL),
    _case("bottom_right", t=40, s=56, **_BOTTOM_RIGHT),
    _case("bottom_right_more_queries", t=40, s=24, **_BOTTOM_RIGHT),
    _case("one_query", t=1, **_BOTTOM_RIGHT),
    _case("one_key", s=1),
    _case("odd_head_dims", h=20, v=13, **_CAUSAL),
    _case("value_narrower", h=32, v=16),
    _case("value_wider", h=32, v=64, **_BOTTOM_RIGHT),
    _case("window", window=(5, 3)),
    _case("window_left_only", window=(4, None)),
    _case("window_right_only", window=(None, 6)),
    _case("window_wider_than_int32", window=(2**40, 2**33)),
    _case("window_causal", window=(6, 2), **_CAUSAL),
    _case("window_bottom_right", window=(5, 2), alignment="bottom_right"),
    _case("window_dead_rows", t=40, s=24, window=(3, 2)),
    _case("window_dead_rows_bottom_right", t=40, s=24, window=(3, 1), alignment="bottom_right"),
    _case("bias", bias=(2, 4, 24, 40), bias_dtype="bfloat16"),
    _case("bias_f16", bias=(2, 4, 24, 40), bias_dtype="float16", dtype="float16", **_CAUSAL),
    _case("bias_of_heads", bias=(1, 4, 24, 40), bias_dtype="bfloat16"),
    _case("bias_of_batch", bias=(2, 1, 24, 40), bias_dtype="bfloat16"),
    _case("bias_infinite", bias=(2, 4, 24, 40), bias_dtype="bfloat16", infinite_bias=True),
    _case("bias_of_keys", bias=(2, 1, 1, 40), bias_dtype="bfloat16"),
    _case("bias_of_queries", bias=(1, 4, 24, 1), bias_dtype="bfloat16", **_BOTTOM_RIGHT),
    _case("alibi", alibi=1),
    _case("alibi_of_batch", alibi=2, **_CAUSAL),
    _case("alibi_bottom_right", alibi=1, **_BOTTOM_RIGHT),
    _case("alibi_full_bottom_right", alibi=2, alignment="bottom_right"),
    _case("alibi_window", alibi=1, window=(5, 4)),
    _case("alibi_more_queries", alibi=1, t=40, s=24, alignment="bottom_right"),
    _case("alibi_lengths", alibi=4, **_LENGTHS, **_BOTTOM_RIGHT),
    _case("alibi_packed", alibi=1, **_ONE_ROW, **_CAUSAL),
    _case("alibi_packed_rows", alibi=2, **_TWO_ROWS),
    _case("dropout", dropout=0.4),
    _case("dropout_causal_f16", dropout=0.25, dtype="float16", **_CAUSAL),
    _case("dropout_packed", dropout=0.3, **_ONE_ROW),
    _case("soft_cap", soft_cap=1.5),
    _case("soft_cap_causal", soft_cap=2.0, **_CAUSAL),
    _case("deterministic", deterministic=True, s=300),
    _case("scale_0", scale=0.0, lse_grad=True),
    _case("scale_negative", scale=-0.2, s=300, **_BOTTOM_RIGHT),
    _case("scale_negative_packed", scale=-0.2, **_ONE_ROW),
    _case("deterministic_causal", deterministic=True, t=140, s=300, **_BOTTOM_RIGHT),
    _case("deterministic_wide", deterministic=True, s=150, h=136),
    _case("deterministic_value_wider", deterministic=True, s=150, v=136),
    _case("deterministic_packed", deterministic=True, **_ONE_ROW, **_CAUSAL),
    _case("lengths", **_LENGTHS),
    _case("lengths_of_keys_alone", kv_lengths=(40, 13), **_BOTTOM_RIGHT),
    _case("lengths_bottom_right", **_LENGTHS, **_BOTTOM_RIGHT),
    _case("lengths_window", **_LENGTHS, window=(3, 4)),
    _case("packed", **_ONE_ROW),
    _case("packed_f16", **_ONE_ROW, dtype="float16", **_CAUSAL),
    _case("packed_bottom_right", **_ONE_ROW, **_BOTTOM_RIGHT),
    _case("packed_window", **_ONE_ROW, window=(2, 3), alignment="bottom_right"),
    _case("packed_rows", **_TWO_ROWS, **_CAUSAL),
    _case("packed_rows_bottom_right", **_TWO_ROWS, **_BOTTOM_RIGHT, k=4),
    _case("segments", **_SEGMENTS),
    _case("segments_f16", **_SEGMENTS, dtype="float16", **_CAUSAL),
    _case("segments_bottom_right", **_SEGMENTS, **_BOTTOM_RIGHT),
    _case("segments_window", **_SEGMENTS, window=(2, 3), alignment="bottom_right"),
    _case("segments_lengths", **_SEGMENTS, q_lengths=(20, 13), kv_lengths=(29, 33), **_CAUSAL),
    _case("segments_above_the_most", **(_SEGMENTS | {"max_segments": 2})),
    _case("segments_alibi", **_SEGMENTS, alibi=2, **_BOTTOM_RIGHT),
    _case("segments_dropout", **_SEGMENTS, dropout=0.3, dtype="float16"),
    _case("segments_deterministic", **_SEGMENTS, deterministic=True),
    _case("segments_one", **(_SEGMENTS | {"max_segments": 1}), **_CAUSAL),
    _case("lse_grad", lse_grad=True),
    _case("lse_grad_f16", lse_grad=True, dtype="float16", **_CAUSAL),
    _case("lse_grad_dead_rows", lse_grad=True, t=40, s=24, **_BOTTOM_RIGHT),
    _case("lse_grad_odd_head_dims", lse_grad=True, h=20, v=13),  # padding has columns
    _case("lse_grad_bias", lse_grad=True, bias=(2, 4, 24, 40), bias_dtype="bfloat16"),
    _case("lse_grad_alibi_window", lse_grad=True, alibi=1, window=(5, 4)),
    _case("lse_grad_dropout", lse_grad=True, dropout=0.4, **_CAUSAL),
    _case("lse_grad_deterministic", lse_grad=True, deterministic=True, s=300, h=128),
    _case("lse_grad_lengths", lse_grad=True, **_LENGTHS, **_BOTTOM_RIGHT),
    _case("lse_grad_packed", lse_grad=True, **_ONE_ROW, **_CAUSAL),
    _case("lse_grad_segments", lse_grad=True, **_SEGMENTS),
    _case("split", **_CACHE, **_BOTTOM_RIGHT),
    _case("split_f16", **_CACHE, dtype="float16"),
    _case("split_d96", **_CACHE | {"h": 96, "k": 4, "n": 4}),
    _case("split_odd_head_dims", **_CACHE, h=20, v=13),
    _case("split_value_wider", **_CACHE, h=64, v=136),
    _case("split_queries", **_CACHE | {"t": 5}),
    _case("split_queries_causal", **_CACHE | {"t": 5}, **_BOTTOM_RIGHT),
    _case("split_queries_top_left", **_CACHE | {"t": 5}, **_CAUSAL),
    _case("split_query_lengths", **_CACHE | {"t": 5}, q_lengths=(3, 5, 4), **_BOTTOM_RIGHT),
    _case("split_query_lengths_full", **_CACHE | {"t": 3}, q_lengths=(3, 2, 0)),
    _case("split_window", **_CACHE, window=(40, 0), alignment="bottom_right"),
    _case(
        "split_window_queries",
        **_CACHE | {"t": 6},
        window=(30, 2),
        alignment="bottom_right",
        q_lengths=(6, 2, 1),
        inference=True,
    ),
    _case("split_one_key", **_CACHE, is_causal=True),
    _case("split_soft_cap", **_CACHE, soft_cap=1.5, **_BOTTOM_RIGHT),
    _case("split_alibi", **_CACHE, alibi=1, **_BOTTOM_RIGHT),
    _case(
        "split_alibi_queries", **_CACHE | {"t": 4}, alibi=3, q_lengths=(4, 1, 3), **_BOTTOM_RIGHT
    ),
    _case("split_scale_negative", **_CACHE, scale=-0.2),
    _case("split_long", b=1, t=1, s=1900, n=2, k=1, kv_lengths=(1777,)),
    _case("paged", **_PAGED, **_BOTTOM_RIGHT),
    _case("paged_f16", **_PAGED, dtype="float16", h=64),
    _case("paged_no_groups", **_PAGED | {"k": 4}),
    _case("paged_value_narrower", **_PAGED, h=64, v=32),
    _case("paged_odd_head_dims", **_PAGED, h=20, v=13),
    _case("paged_wide", **_PAGED | {"b": 3, "n": 2, "k": 2}, h=192, v=256),
    _case("paged_of_256", **_PAGED | {"s": 512, "page": 256, "kv_lengths": (300, 512, 1)}),
    _case("paged_queries", **_PAGED | {"t": 12}, **_BOTTOM_RIGHT),
    _case("paged_query_lengths", **_PAGED | {"t": 12}, q_lengths=(12, 7, 5), **_BOTTOM_RIGHT),
    _case(
        "paged_window",
        **_PAGED | {"t": 9},
        window=(150, 0),
        alignment="bottom_right",
        q_lengths=(9, 0, 4),
    ),
    _case("paged_soft_cap", **_PAGED, soft_cap=1.5, **_BOTTOM_RIGHT),
    _case("paged_alibi", **_PAGED | {"t": 3}, alibi=3, **_BOTTOM_RIGHT),
    _case("paged_shared", **_PAGED, shared_pages=1),
    _case("paged_wrong_length", **_PAGED | {"kv_lengths": (300, -1, 385)}),
    _case("split_heads_first", **_CACHE | {"t": 5}, heads_first="q kv", **_BOTTOM_RIGHT),
    _case("paged_heads_first", **_PAGED, h=64, v=32, heads_first="kv"),
    _case("paged_heads_first_alibi", **_PAGED | {"t": 3}, alibi=3, heads_first="kv"),
    _case("paged_one_pool", **_PAGED, one_pool=True, **_BOTTOM_RIGHT),
    _case("paged_one_pool_heads_first", **_PAGED, one_pool=True, heads_first="kv"),
    _case("large_scores", magnitude=10.0),
    _case("negative_scores", score_shift=-100.0, t=96, s=96, h=64, **_CAUSAL),
    _case("asm", **_ASM),
    _case("asm_causal", **(_ASM | {"t": 144, "s": 144}), **_CAUSAL),
    _case("asm_bottom_right", **_ASM, **_BOTTOM_RIGHT),
    _case("asm_f16", **_ASM, dtype="float16"),
    _case("asm_d64", **(_ASM | {"h": 64, "b": 2}), **_BOTTOM_RIGHT),
    _case("asm_d192", **(_ASM | {"h": 192, "v": 128})),
    _case("asm_lse_grad", lse_grad=True, **(_ASM | {"h": 126}), **_BOTTOM_RIGHT),
    _case("asm_packed", **_ASM_RAGGED),
    _case("asm_packed_bottom_right", **_ASM_RAGGED, **_BOTTOM_RIGHT),
)

# The architectures differ only in their ASM kernels.
CASES_BY_GFX: tuple[tuple[Case, str], ...] = (
    *((case, "gfx942") for case in AITER_CASES),
    *((case, "gfx950") for case in AITER_CASES if case.name.startswith("asm")),
)

# The front end does not choose 16-bit atomics, which are less accurate, but the handlers run them:
# gfx950 sums dq in a third layout of dq_acc, gfx942 in dq itself.
SIXTEEN_BIT_CASES: tuple[tuple[Case, str], ...] = tuple(
    (_case(f"sixteen_bit_{name}", **_ASM | {"b": 2, "t": 150}, **options), gfx)
    for name, options in (("full", {}), ("bottom_right", _BOTTOM_RIGHT))
    for gfx in ("gfx942", "gfx950")
)
