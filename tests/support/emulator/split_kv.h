// The split-KV forward pass of one query row: the result of each split of the keys, and their
// combination.
#pragma once

#include "scores.h"

namespace attn_emulator {

// A batch row. Its keys end at its length.
ATTN_HD Sequence row_of(const AttnAiterSplitKv& split, int32_t index) {
  return {index, 0, 0, split.call.seq_len_q, split.call.seqlen_k[index]};
}

// The offset of one key, in whichever page it is.
ATTN_HD int64_t key_offset(const AttnAiterSplitKv& split, const Sequence& s, int32_t head,
                           int32_t col, int64_t batch_stride, int64_t nhead_stride,
                           int64_t stride) {
  int64_t block = s.index, inside = col;
  if (split.page_table) {
    const int64_t entry =
        static_cast<int64_t>(s.index) * split.batch_stride_page_table + col / split.page_size;
    block = split.page_table[entry];
    inside = col % split.page_size;
  }
  return block * batch_stride + kv_head(split.call, head) * nhead_stride + inside * stride;
}

ATTN_HD float score(const AttnAiterSplitKv& split, const Sequence& s, int32_t head, int32_t row,
                    int32_t col) {
  const AttnAiterCall& call = split.call;
  const int64_t q =
      row_offset(s, 0, head, row, call.batch_stride_q, call.nhead_stride_q, call.stride_q);
  const int64_t k =
      key_offset(split, s, head, col, call.batch_stride_k, call.nhead_stride_k, call.stride_k);
  float x = call.scale * dot(call.q, q, call.k, k, call.head_dim, call.dtype);
  if (split.logits_soft_cap > 0.0f) {
    x = split.logits_soft_cap * tanhf(x / split.logits_soft_cap);
  }
  if (call.bias_kind == ATTN_AITER_ALIBI) {
    const int64_t at = static_cast<int64_t>(s.index) * call.stride_bias + head;
    x += alibi(call, s, static_cast<const float*>(call.bias)[at], row, col);
  }
  return x;
}

ATTN_HD int64_t lse_acc_offset(const AttnAiterSplitKv& split, const Sequence& s, int32_t head,
                               int32_t row, int32_t part) {
  return row_offset(s, 0, head, row, split.batch_stride_lse_acc, split.nhead_stride_lse_acc, 1) +
         static_cast<int64_t>(part) * split.split_stride_lse_acc;
}

ATTN_HD int64_t out_acc_offset(const AttnAiterSplitKv& split, const Sequence& s, int32_t head,
                               int32_t row, int32_t part) {
  return row_offset(s, 0, head, row, split.batch_stride_out_acc, split.nhead_stride_out_acc,
                    split.stride_out_acc) +
         static_cast<int64_t>(part) * split.split_stride_out_acc;
}

// Attends within one split. Splits divide the row's keys, not the space for them
// (block_masking.hpp).
ATTN_HD void split_row(const AttnAiterSplitKv& split, const Sequence& s, int32_t head, int32_t row,
                       int32_t part) {
  const AttnAiterCall& call = split.call;
  const int64_t share = (static_cast<int64_t>(s.len_k) + split.num_splits - 1) / split.num_splits;
  const int64_t first = share * part;
  const int64_t last = first + share < s.len_k ? first + share : s.len_k;
  float values[kMaxHeadDim] = {};
  float top = -infinity(), sum = 0.0f;
  for (int32_t col = static_cast<int32_t>(first); col < last; ++col) {
    if (!is_visible(call, s, row, col)) continue;
    const float x = score(split, s, head, row, col);
    if (x > top || is_nan(x)) top = x;
    if (is_nan(top)) break;
  }
  const float base = top == -infinity() ? 0.0f : top;
  for (int32_t col = static_cast<int32_t>(first); col < last; ++col) {
    if (!is_visible(call, s, row, col)) continue;
    const float p = expf(score(split, s, head, row, col) - base);
    sum += p;
    const int64_t v =
        key_offset(split, s, head, col, call.batch_stride_v, call.nhead_stride_v, call.stride_v);
    for (int32_t d = 0; d < call.head_dim_v; ++d) values[d] += p * load(call.v, v + d, call.dtype);
  }
  const bool is_empty = top == -infinity();
  split.lse_acc[lse_acc_offset(split, s, head, row, part)] =
      is_empty ? -infinity() : top + logf(sum);
  float* out = split.out_acc + out_acc_offset(split, s, head, row, part);
  for (int32_t d = 0; d < call.head_dim_v; ++d) out[d] = is_empty ? 0.0f : values[d] / sum;
}

ATTN_HD void combine_row(const AttnAiterSplitKv& split, const Sequence& s, int32_t head,
                         int32_t row) {
  const AttnAiterCall& call = split.call;
  float top = -infinity(), sum = 0.0f;
  for (int32_t part = 0; part < split.num_splits; ++part) {
    const float lse = split.lse_acc[lse_acc_offset(split, s, head, row, part)];
    if (lse > top || is_nan(lse)) top = lse;
    if (is_nan(top)) break;
  }
  for (int32_t part = 0; part < split.num_splits && top != -infinity(); ++part) {
    sum += expf(split.lse_acc[lse_acc_offset(split, s, head, row, part)] - top);
  }
  const float lse = top == -infinity() ? top : top + logf(sum);
  float values[kMaxHeadDim] = {};
  for (int32_t part = 0; part < split.num_splits; ++part) {
    const float found = split.lse_acc[lse_acc_offset(split, s, head, row, part)];
    const float weight = lse == -infinity() ? 0.0f : expf(found - lse);
    const float* out = split.out_acc + out_acc_offset(split, s, head, row, part);
    for (int32_t d = 0; d < call.head_dim_v; ++d) values[d] += weight * out[d];
  }
  const int64_t out =
      row_offset(s, 0, head, row, call.batch_stride_out, call.nhead_stride_out, call.stride_out);
  for (int32_t d = 0; d < call.head_dim_v; ++d) {
    store(split.out, out + d, values[d], call.dtype, rounding(call));
  }
  if (split.lse) split.lse[lse_offset(call, s, head, row)] = lse;
}

}  // namespace attn_emulator
