"""Cases that once failed when they were drawn, reduced to what shows the cause, with the cause."""

from __future__ import annotations

from attn_dispatch.core.rewrites.narrow_bias import NARROW_BIAS
from attn_dispatch.core.rewrites.packed_as_padded import PACKED_AS_PADDED
from attn_dispatch.core.rewrites.sinks import SINKS_AFTERWARDS
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Facts, Packed, Ragged, case

_PACKED: Facts = {"packed": Packed((((1, 0.3), (2, 0.5)), ((1, 0.6), (3, 0.2)))), "max_segments": 3}
_LENGTHS: Facts = {"q_lengths": (1, 0.4), "kv_lengths": (0.7, 0.3)}
_SIXTEEN: Facts = {"dtype": "bfloat16", "bias_dtype": "bfloat16"}
_DIAGONAL: Facts = {"window": (0, 0)}
"""Each query attends to one key, so that the exact gradients of query and key are 0."""


def _ragged(t: int, s: int) -> Facts:
    return Ragged(((0.3, 0.5),), ((0.5, 0.4),)).facts(t, s) | {"t": t, "s": s}


def _found(name: str, **facts: object) -> Case:
    return case(f"found/{name}", **facts)


FOUND: tuple[Case, ...] = (
    # cuDNN takes the maximum of a row before it multiplies by the scale.
    _found("scale_0", scale=0.0),
    # cuDNN reads a bias for one query and one key at the same place for all heads.
    _found("bias_of_one_pair", t=1, s=1, dtype="float16", bias="1n11", lse_grad=True),
    _found("bias_of_one_pair_batch", t=1, s=1, bias="bn11", lse_grad=True),
    _found("scale_0_causal_sinks", scale=0.0, sinks=1, lse_grad=True, **CAUSAL),
    _found("scale_0_lengths", scale=0.0, dtype="float16", **_LENGTHS),
    _found("scale_0_packed", scale=0.0, **_PACKED),
    _found("scale_0_query_alone", scale=0.0, wanted=("query",)),
    _found("scale_negative", scale=-0.125, **CAUSAL),
    _found("scale_negative_lengths", scale=-0.3, dtype="float16", **_LENGTHS),
    _found("scale_negative_packed", scale=-0.3, **_PACKED),
    _found("scale_negative_soft_cap", scale=-0.125, soft_cap=2.0, **CAUSAL),
    _found("scale_negative_bias", scale=-0.125, bias="1nts"),
    _found("scale_tiny", scale=1e-30, **CAUSAL),
    _found("scale_large", scale=4.0, **CAUSAL),
    # Before 9.28, packed backward passes of wide heads with narrower values write garbage.
    _found("wide_heads_packed", h=256, v=128, **_PACKED),
    _found("wide_heads_packed_narrow", h=256, v=48, dtype="float16", **_PACKED),
    _found("wide_heads_lengths", h=208, v=112, **_LENGTHS),
    _found("wide_heads_ragged", h=256, v=128, k=1, **_ragged(320, 256)),
    # cuDNN 9.28 counts the sink in the row maximum.
    _found("row_max_sinks", sinks=1, needs_max=True, scale=1e-6),
    _found("row_max_sinks_packed", sinks=1, needs_max=True, **_PACKED, **CAUSAL),
    # cuDNN's kernel for one query drops entries that the mask which it returns does not have.
    _found("one_query_dropout", t=1, s=320, h=96, dropout=0.5),
    # cuDNN's kernel that splits the keys of one query computes ALiBi wrong.
    _found("one_query_alibi", t=1, s=512, alibi=1, inference=True),
    _found("one_query_alibi_tiny_scale", t=1, s=300, h=256, k=4, alibi=1, scale=1e-6),
    _found("one_query_alibi_lengths", t=1, s=512, alibi=1, kv_lengths=(1.0, 0.8)),
    # p · (dp - delta) should be 0, but delta comes from the output rounded to 16 bits, and dp and
    # delta are different float32 sums.
    _found("one_key_a_row", scale=4.0, dtype="float16", h=160, **_DIAGONAL, **CAUSAL),
    _found("one_key_a_row_sinks", sinks=1, **_DIAGONAL, **CAUSAL),
    _found("one_key_a_row_dropout", dropout=0.5, **_DIAGONAL, **CAUSAL),
    _found("one_key", s=1, score_shift=300.0, dtype="float16", h=80),
    _found("one_key_lse_grad", s=1, k=1, lse_grad=True, score_shift=-150.0, h=256, v=16),
    # Beside a sink as large as these scores, the probe for the mask, whose scores are 0, had no
    # weight left.
    _found("large_scores_sinks_dropout", score_shift=300.0, sinks=1, dropout=0.5, **_PACKED),
    # With one key, p · (dp - delta) is exactly 0; XLA computes a float32 rounding error instead.
    _found("one_key_xla_backward", s=1, h=136, v=48, scale=-0.3, deterministic=True),
    # Gradients with few entries must be allowed their rounding to 16 bits, too.
    _found(
        "few_keys_large_scores_sinks", sinks=1, lse_grad=True, score_shift=300.0, dtype="float16",
        h=80, **_ragged(64, 2),
    ),
    # XLA computes the gradient of sinks, so that no backward kernel runs for it alone.
    _found("sinks_gradient_alone", sinks=1, lse_grad=True, wanted=("sinks",)),
    _found("soft_cap_infinite_bias", s=2, soft_cap=2.0, bias="bnts", infinite_bias=True),
    # cuDNN multiplies the gradient of a bias by the scale before it rounds it to the call's dtype.
    _found("bias_small_scale", dtype="float16", bias="1nts", scale=1e-6),
    _found("bias_tiny_scale", bias="1nts", scale=1e-30, **CAUSAL),
    # cuDNN 9.19's deterministic dQ of this call was garbage, and different from call to call.
    _found("deterministic_wide_heads", t=300, s=300, k=1, h=160, v=100, deterministic=True),
    # The products of a score may be summed in any order. Here all have the same sign.
    _found("scores_of_one_sign", t=2, s=128, h=256, dtype="float16", score_shift=-150.0),
    # With a soft cap, cuDNN does not mask the rest of the last tile of keys: if lse is low, dQ is
    # NaN.
    _found("soft_cap_alibi_bias", s=2, soft_cap=2.0, bias="bnts", alibi=1),
    _found("soft_cap_alibi", s=2, soft_cap=30.0, alibi=1),
    _found("soft_cap_alibi_lengths", s=33, soft_cap=2.0, alibi=1, **_LENGTHS),
    # All gradients were garbage.
    _found("bias_gradient_wide_heads", s=40, h=192, v=112, bias="11ts", **_SIXTEEN, **CAUSAL),
    _found("bias_gradient_wide_heads_few_keys", s=2, h=136, v=128, bias="bnts", **_SIXTEEN),
    # dQ was NaN if lse is below -88, for head dims up to 192 and value dims up to 128.
    _found("low_lse_wide_heads", s=256, h=160, v=112, score_shift=-150.0),
    _found("low_lse_wide_heads_alibi", t=320, s=128, h=136, v=80, alibi=1, **CAUSAL),
    # The forward pass left out rows that attend to nothing, and the backward pass did not, so their
    # dropout masks differed.
    _found(
        "dropout_wide_values_bottom_right", t=100, s=64, h=20, v=256, dropout=0.1, is_causal=True,
        alignment="bottom_right", lse_grad=True, magnitude=0.01,
    ),
    # A second call of AITER reads the dropout mask for XLA's backward pass. Its head dims must be
    # padded to 256 as well, and it was passed the arrays of both calls.
    _found("dropout_mask_wide_heads", h=136, v=48, dropout=0.5, alibi=1),
    # Pairs that only a row bias of -inf hides were counted as dropped.
    _found(
        "dropout_infinite_row_bias_packed", dropout=0.1, bias="bnt1", infinite_bias=True, **_PACKED,
        **CAUSAL,
    ),
    # Before cuDNN 9.28, the kernel that splits keys sums lse in an order that varies between calls.
    _found("one_query_deterministic", t=1, s=300, h=8, deterministic=True),
    # Sinks were added after the kernel, and XLA computed delta from the output before the rounding.
    _found("sinks_row_max_infinite_bias", sinks=1, needs_max=True, infinite_bias=True, bias="11ts"),
    _found("sinks_row_max_checkpoint", sinks=1, needs_max=True, scale=4.0, transform="checkpoint"),
    # Only one of eight probabilities is rounded, so chance decides how large the error is.
    _found(
        "one_key_sinks", t=33, s=1, k=1, h=20, v=16, dtype="float16", scale=4.0, sinks=1,
        kv_lengths=(1, 0), wanted=("value",),
    ),
    # cuDNN 9.19 computed lse wrong.
    _found("one_query_one_key_soft_cap_bias", t=1, s=1, h=160, soft_cap=2.0, bias="1n11"),
    # The search for rewrites did not end, because two of them undid each other.
    _found("soft_cap_dropout_bias_gradient", soft_cap=2.0, dropout=0.5, bias="1n11"),
    # Rows past the last query were computed like rows of the call, and their derivatives were NaN,
    # which was hidden if rows that attend to nothing were left out.
    _found(
        "score_mod_dead_rows",
        t=256,
        s=2,
        h=200,
        score_mod=(
            Step("x - tanh(y)", 0, 0, 1.0, 8, "n"),
            Step("log(1 + x²)", 1, 0, 1.0, 8, "n"),
            Step("x - log(1 + t - s) if s <= t else x", 2, 0, 1.0, 8, "n"),
            Step("x r", 3, 0, 1.0, 8, "b"),
        ),
        mask_mod=("s == 0 or |t - s| <= w + n", 18),
        lse_grad=True,
        mixed_poison=True,
        **BOTTOM_RIGHT,
    ),
    # XLA found that no pair is left, and removed the forward kernel that the suite expects.
    _found("mask_mod_leaves_no_pair", t=1, s=300, mask_mod=("s < t and s < x[b]", 62)),
    # cuDNN 9.28 reads outside of its arrays if a score_mod reads the scores more than once.
    _found(
        "score_mod_reads_scores_twice",
        t=100,
        s=256,
        h=200,
        score_mod=(Step("log(1 + x²)", 0, 0, 1.0, 8, "n"),),
        mask_mod=("s <= t or s < x[b]", 88),
        lse_grad=True,
    ),
    # With three arrays by row, cuDNN used the bound of the mask in place of the lengths.
    _found(
        "score_mod_arrays_by_row",
        b=3,
        t=256,
        s=192,
        h=20,
        dtype="float16",
        score_mod=(
            Step("c tanh(x / c)", 0, 0, 0.75, 15, "n"),
            Step("c - x", 1, 0, 1.6875, 34, "b"),
            Step("x - |t - s| / w", 0, 2, 1.625, 42, "n"),
            Step("x + r tanh((t - s) / 16)", 2, 2, 0.75, 9, "b"),
            Step("sin(x) y", 3, 1, 0.75, 33, "n"),
            Step("x - tanh(y)", 3, 4, 1.125, 27, "n"),
            Step("c - x", 5, 5, 1.8125, 61, "n"),
            Step("x - tanh(y)", 7, 6, 0.3125, 38, "b"),
        ),
        mask_mod=("s <= t or s < x[b]", 96),
        kv_lengths=(0.25, 0, 1),
        **CAUSAL,
    ),
    # Kernels round the gradient of scores after they multiply it by the scale, and round again the
    # part of each head of a group.
    _found(
        "one_pair_lse_grad", t=2, s=1, h=8, dtype="float16", lse_grad=True,
        scale=0.35355339059327373, transform="donate", **_PACKED, **BOTTOM_RIGHT,
    ),
    # delta comes from the rounded output, and half of it is the sink's part.
    _found("row_bias_sinks", t=100, s=2, h=136, dtype="float16", bias="1nt1", sinks=1, scale=4.0),
    _found("mixed_poison_packed", mixed_poison=True, **_PACKED, **CAUSAL),
    # The bias has four entries. By chance, the naive computation has small errors in all of them.
    _found(
        "row_bias_one_entry", b=4, t=256, s=100, n=3, k=3, h=128, dtype="float16", bias="b111",
        bias_dtype="float16", lse_grad=True, wanted=("query", "key", "bias"), transform="scan",
        scale=1e-30, **CAUSAL,
    ),
    # Later steps used an lse that includes the sinks as if it did not.
    _found("sinks_then_slopes", alibi=1, sinks=1, rewrite=SINKS_AFTERWARDS.name, **CAUSAL),
    _found("sinks_then_row_bias", bias="1nt1", sinks=1, rewrite=SINKS_AFTERWARDS.name),
    # XLA removed the rounding of the bias to 16 bits, so that every bias seemed to fit in them.
    _found("narrow_bias", bias="bnts", dtype="float16", rewrite=NARROW_BIAS.name),
    _found("narrow_bias_exact", bias="1nts", rounded_bias=True, rewrite=NARROW_BIAS.name),
    # The padded call had the gradient of a bias that the packed call does not have.
    _found("padded_slopes", alibi=1, dropout=0.5, rewrite=PACKED_AS_PADDED.name, **_PACKED),
    # cudnn-frontend makes packed gradients with heads first too small, and kernels wrote past them.
    _found("heads_first_packed", heads_first="q kv", **_PACKED),
    _found("heads_first_ragged", heads_first="q", h=128, **_ragged(64, 192), **CAUSAL),
    _found("heads_first_lengths", heads_first="kv", k=1, **_LENGTHS),
    # On a GPU, XLA sums in any order the gradients of an entry that several sequences read.
    _found(
        "sum_deterministic",
        score_mod=(Step("r tanh((t - s) / 16)", 0, 0, 1.0, 8, "s"),),
        deterministic=True,
        **_PACKED,
    ),
    # The rewrite called itself for the call with the slopes as a bias, with an argument too few.
    _found("packed_slopes_as_mask", alibi=1, **(_PACKED | {"max_segments": None}), **CAUSAL),
)  # fmt: skip
