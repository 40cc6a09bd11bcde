// The forward pass of one query row.
#pragma once

#include "scores.h"

namespace attn_emulator {

ATTN_HD void store_out_row(const AttnAiterForward& forward, const Sequence& s, int32_t head,
                           int32_t row, const float* values, float factor, float lse) {
  const AttnAiterCall& call = forward.call;
  const int64_t out = row_offset(s, s.start_q, head, row, call.batch_stride_out,
                                 call.nhead_stride_out, call.stride_out);
  for (int32_t d = 0; d < call.head_dim_v; ++d) {
    store(forward.out, out + d, values[d] * factor, call.dtype, rounding(call));
  }
  if (forward.lse) forward.lse[lse_offset(call, s, head, row)] = lse;
}

ATTN_HD void forward_row(const AttnAiterForward& forward, const Sequence& s, int32_t head,
                         int32_t row) {
  const AttnAiterCall& call = forward.call;
  float values[kMaxHeadDim] = {};
  if (s.len_k == 0) {
    // dev18's ASM kernels divide by an empty sum (aiter#1442).
    const float nothing = call.use_asm ? not_a_number() : 0.0f;
    store_out_row(forward, s, head, row, values, nothing, call.use_asm ? nothing : -infinity());
    return;
  }
  float top = -infinity();
  for (int32_t col = 0; col < s.len_k; ++col) {
    if (!is_visible(call, s, row, col)) continue;
    const float x = score(call, s, head, row, col, forward.logits_soft_cap);
    if (x > top || is_nan(x)) top = x;
    if (is_nan(top)) break;
  }
  const bool sees_nothing = top == -infinity();
  const float base = sees_nothing ? 0.0f : top;
  float sum = 0.0f;
  for (int32_t col = 0; col < s.len_k; ++col) {
    if (!is_visible(call, s, row, col)) continue;
    const float p = expf(score(call, s, head, row, col, forward.logits_soft_cap) - base);
    sum += p;
    if (!is_kept(call, s, head, row, col)) continue;
    const int64_t v = row_offset(s, s.start_k, kv_head(call, head), col, call.batch_stride_v,
                                 call.nhead_stride_v, call.stride_v);
    for (int32_t d = 0; d < call.head_dim_v; ++d) {
      values[d] += p * load(call.v, v + d, call.dtype);
    }
  }
  const float kept_scale = call.dropout_rate > 0.0f ? 1.0f / (1.0f - call.dropout_rate) : 1.0f;
  float factor = kept_scale / sum;
  if (sees_nothing) {
    // CK checks for an empty sum only in kernels with a mask (block_fmha_pipeline_qr_ks_vs.hpp,
    // IsMasking): a row that only a bias of -inf hides becomes NaN.
    factor = call.mask == ATTN_AITER_NO_MASK ? not_a_number() : 0.0f;
  }
  store_out_row(forward, s, head, row, values, factor,
                sees_nothing ? -infinity() : top + logf(sum));
}

}  // namespace attn_emulator
