"""The calls on which the rules are compared with AITER's dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, product

from attn_dispatch.aiter.call import AiterCall

CALL = AiterCall(
    backward=False, dtype="bfloat16", is_group=False, has_gaps=False, batch=2,
    seq_len_q=512, seq_len_kv=512, max_seq_len_q=512, max_seq_len_kv=512,
    num_heads=8, num_kv_heads=8, head_dim=128, head_dim_v=128,
    mask="none", window_left=-1, window_right=-1, bias="none", has_dbias=False,
    logits_soft_cap=0.0, dropout_rate=0.0, deterministic=False, needs_lse=True,
)  # fmt: skip

HEAD_DIMS = (
    *((d, d) for d in (32, 40, 64, 72, 128, 136, 192, 200, 256, 264)),
    *((192, 128), (160, 96), (128, 64), (64, 128), (64, 256), (128, 192)),
    *((64, 72), (128, 136), (192, 200), (192, 136)),  # as gradients through lse need
)
LENGTHS = (
    (1, 512), (16, 16), (17, 300), (64, 64), (128, 128), (129, 129),
    (500, 512), (512, 500), (512, 512),
)  # fmt: skip
MASKS = (
    ("none", -1, -1),
    ("top_left", -1, 0),
    ("bottom_right", -1, 0),
    ("top_left", 128, 0),
    ("bottom_right", 128, 0),
    ("bottom_right", 64, 32),
    ("bottom_right", -1, 32),
    ("bottom_right", 0, 0),
)
OPTIONS = (
    {"bias": "bias"},
    {"bias": "bias", "has_dbias": True},
    {"bias": "alibi"},
    {"dropout_rate": 0.1},
    {"dropout_rate": 0.1, "bias": "bias"},
    {"logits_soft_cap": 30.0},
    {"logits_soft_cap": 30.0, "bias": "alibi"},
    {"logits_soft_cap": 30.0, "bias": "bias"},
    {"deterministic": True},
    {"deterministic": True, "dropout_rate": 0.1},
    {"deterministic": True, "bias": "bias", "has_dbias": True},
    {"needs_lse": False},
)
SPLIT_MASKS = (*MASKS[:3], ("bottom_right", 64, 32))
SPLIT_OPTIONS = (
    {},
    {"needs_lse": False},
    {"bias": "alibi"},
    {"bias": "bias"},
    {"logits_soft_cap": 30.0},
    {"logits_soft_cap": 30.0, "bias": "alibi"},
)
MODES = ((False, False), (True, False), (True, True))


@lru_cache(maxsize=1)
def calls() -> tuple[AiterCall, ...]:
    return tuple(_calls())


def _calls() -> Iterator[AiterCall]:
    """Every mask with every shape, then every option with every head dim."""
    others = cycle(product((8, 2, 1), ("bfloat16", "float16", "bfloat16", "bfloat16")))
    shapes = product((False, True), HEAD_DIMS, LENGTHS, MASKS, MODES)
    for backward, head_dims, lengths, mask, mode in shapes:
        num_kv_heads, dtype = next(others)
        yield _call(backward, head_dims, lengths, mask, mode, dtype, num_kv_heads, {})
    optional = product(
        (False, True), HEAD_DIMS, ((500, 512),), MASKS[:3], MODES, ("bfloat16", "float16"), OPTIONS
    )
    for backward, head_dims, lengths, mask, mode, dtype, options in optional:
        if backward or not (options.get("has_dbias") or options.get("deterministic")):
            yield _call(backward, head_dims, lengths, mask, mode, dtype, next(others)[0], options)


@lru_cache(maxsize=1)
def split_calls() -> tuple[AiterCall, ...]:
    """Split-KV calls: every mask and option with every head dim, in pages and not."""
    shapes = product(HEAD_DIMS, (1, 5, 64, 300), (0, 128, 256, 64), SPLIT_MASKS, SPLIT_OPTIONS)
    others = cycle(product((8, 2, 1), ("bfloat16", "float16")))
    found = []
    for (dim, dim_v), rows, page, mask, options in shapes:
        num_kv_heads, dtype = next(others)
        call = replace(
            CALL, dtype=dtype, batch=3, seq_len_q=rows, max_seq_len_q=rows, seq_len_kv=1024,
            max_seq_len_kv=1024, num_kv_heads=num_kv_heads, head_dim=dim, head_dim_v=dim_v,
            mask=mask[0], window_left=mask[1], window_right=mask[2], is_split=True,
            page_size=page, num_pages=40 if page else 0, **options,
        )  # fmt: skip
        found.append(call)
    return tuple(found)


def _call(backward, head_dims, lengths, mask, mode, dtype, num_kv_heads, options) -> AiterCall:
    is_group, has_gaps = mode
    rows = 3 if is_group else 1
    return replace(
        CALL, backward=backward, dtype=dtype, is_group=is_group, has_gaps=has_gaps, batch=3,
        seq_len_q=rows * lengths[0], seq_len_kv=rows * lengths[1],
        max_seq_len_q=lengths[0], max_seq_len_kv=lengths[1],
        num_kv_heads=num_kv_heads, head_dim=head_dims[0], head_dim_v=head_dims[1],
        mask=mask[0], window_left=mask[1], window_right=mask[2],
        **{"needs_lse": not backward, **options},
    )  # fmt: skip
