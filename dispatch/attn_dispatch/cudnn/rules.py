"""What this version does not run through cuDNN, before cuDNN itself is asked."""

from __future__ import annotations

from collections.abc import Callable

from attn_dispatch.call.spec import AttentionSpec, is_mod_operand
from attn_dispatch.cudnn.call import (
    CudnnCall,
    band_of,
    counts_alibi_from_lengths,
    has_score_bias,
    nodes_of,
)
from attn_dispatch.programs.program import is_finite
from attn_dispatch.semantics.row_ids import is_packed
from attn_dispatch.semantics.scaled_query import is_out_of_range

_WIDEST_HEAD = 2048
"""On sm90 cuDNN compiles forward kernels of any width: 2 s for heads of 1,024, 6 s of 4,096, and
beyond 10 s of 16,384, for each way to express the call (9.28)."""

Rule = tuple[Callable[[AttentionSpec], bool], str]

_INT32_LIMIT = 2**31

_WITHOUT_ARRAYS_BY_ROW = ("sm8", "sm12")
_MOST_ARRAYS_BY_ROW = 2
"""A backward kernel holds some numbers for each row: 4 on sm90, and 2 where it has room for none
beside its own, lse and delta, as cuDNN says when it refuses. It counts those of floats alone, and
reads wrong ones where integers make them too many (H200, 9.19, 9.28)."""


_RULES: tuple[Rule, ...] = (
    (
        lambda s: any(is_mod_operand(x) for x in s.options.gradients),
        "the gradient of what score_mod reads",
    ),
    (
        lambda s: s.is_empty or 0 in (s.head_dim, s.head_dim_v),
        "an axis has length zero, so there is nothing to compute",
    ),
    (
        lambda s: max(s.head_dim, s.head_dim_v) > _WIDEST_HEAD,
        f"heads wider than {_WIDEST_HEAD:,}: cuDNN would compile them for minutes",
    ),
    (
        lambda s: not s.symbols and max(s.seq_len_q, s.seq_len_kv) >= _INT32_LIMIT,
        "2^31 queries or keys: cuDNN counts them in 32 bits",
    ),
    (
        lambda s: s.has("query_segment_ids") and s.options.max_segments is None,
        "segment ids: pass max_segments, the largest id",
    ),
    (lambda s: s.has("window"), "local_window_size as an array: cuDNN's window is static"),
    (
        is_out_of_range,
        "scale: cuDNN multiplies by it in float32, where it or its reciprocal is no normal number",
    ),
    (
        lambda s: is_packed(s) and has_score_bias(s),
        "packed sequences: cuDNN counts a bias or mask from the start of each sequence",
    ),
    (
        lambda s: is_packed(s) and s.options.needs_keep,
        "packed sequences: the dropout mask is not read back by this version",
    ),
    (
        # Backward does not need them.
        lambda s: s.has("sinks") and s.shape("sinks")[0] > 1 and not s.is_backward,
        "sinks: cuDNN has one for each head",
    ),
    (
        lambda s: s.has("mask") and not is_finite(s.options.score_mod),
        "score_mod: may be NaN where the mask forbids, which cuDNN adds -inf for",
    ),
    (
        # A row that only mask_mod leaves no key gets the sink's as lse.
        lambda s: s.has("sinks") and s.options.mask_mod is not None and not s.is_backward,
        "sinks beside a mask_mod: cuDNN takes a row that attends nothing for one of a sink",
    ),
    (
        lambda s: s.has("alibi_slopes") and s.shape("alibi_slopes")[0] > 1,
        "alibi_slopes: cuDNN has one for each head",
    ),
    (
        # They cancel, and cuDNN has rounded each of them to 16 bits by then.
        lambda s: "bias" in s.options.gradients and s.shape("bias")[3] == 1 and s.seq_len_kv > 1,
        "the gradient of a bias that is the same for all keys would be inaccurate",
    ),
    (
        lambda s: s.options.dropout_rate > 0 and s.shape("dropout_key")[0] > 1,
        "dropout: cuDNN has one key for each call",
    ),
    (lambda s: "alibi_slopes" in s.options.gradients, "the gradient of alibi_slopes"),
    (
        counts_alibi_from_lengths,
        "alibi_slopes: cuDNN does not count distances from the bottom right of lengths",
    ),
    (
        lambda s: band_of(s) is None,
        "cuDNN has no such bottom-right mask together with a bias, a mask, ALiBi or dropout",
    ),
)
"""A condition, and the reason against a call that meets it."""


def not_supported_reasons(spec: AttentionSpec) -> tuple[str, ...]:
    """Every rule the call breaks."""
    reasons = [reason for breaks, reason in _RULES if breaks(spec)]
    if spec.dtype not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16, got {spec.dtype}")
    if spec.options.mods and isinstance(why := nodes_of(spec, packed=False), str):
        reasons.append(why)
    return tuple(reasons)


def reasons_against(call: CudnnCall, arch: str, *, whole_pages: bool = False) -> tuple[str, ...]:
    """Why cuDNN must not be asked for this one of the ways to say a call.

    Args:
      call: as cuDNN would be asked.
      arch: of the device, "sm90".
      whole_pages: whether nothing but live keys stands in the pages that its kernels may read.
    """
    if call.page_size and not (call.decodes or whole_pages):
        # Right, but for what it makes of NaN behind the last key of a page (H200, 9.19 and 9.28).
        return (
            "keys in pages: for all but a plain, single query of each row cuDNN's kernel "
            "multiplies by what stands past a length",
        )
    if call.page_size.bit_count() > 1:
        return ("keys in pages: cuDNN wants a power of two of them in a page",)
    if call.packed_elements >= _INT32_LIMIT:
        return (
            "packed sequences: an array has 2^31 elements or more, past cuDNN's 32-bit offsets "
            f"(heads of {call.head_dim} and {call.head_dim_v}, as padded)",
        )
    if call.seq_len_q == call.seq_len_kv == 1 and max(call.bias_batch, call.bias_heads) > 1:
        # lse is off by the difference of two heads' biases (H200, 9.19).
        return ("a bias of one query and one key: cuDNN reads the same number for all heads",)
    if call.reads_batch_of_one_row:
        return ("an array is read by b, for a single query, which cuDNN does not do right",)
    most = 0 if arch.startswith(_WITHOUT_ARRAYS_BY_ROW) else _MOST_ARRAYS_BY_ROW
    if call.backward and call.arrays_by_row > most:
        return (
            f"mods: cuDNN's backward pass has room for {most} arrays by row on {arch}, and mods "
            f"and lengths make {call.arrays_by_row}",
        )
    return ()
