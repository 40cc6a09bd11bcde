// The backward pass in AITER's steps, each for one row: softmax_d; dk, dv and dbias of a key; dq
// into dq_acc, one block of keys after the other; the conversion of dq_acc to dq.
#pragma once

#include "scores.h"

namespace attn_emulator {

// softmax_d = (1 - dropout_rate) * sum(out * out_grad), as in block_fmha_bwd_dot_do_o.hpp.
ATTN_HD void softmax_d_row(const AttnAiterBackward& backward, const Sequence& s, int32_t head,
                           int32_t row) {
  const AttnAiterCall& call = backward.call;
  const int64_t out = row_offset(s, s.start_q, head, row, call.batch_stride_out,
                                 call.nhead_stride_out, call.stride_out);
  const int64_t out_grad = row_offset(s, s.start_q, head, row, backward.batch_stride_out_grad,
                                      backward.nhead_stride_out_grad, backward.stride_out_grad);
  const float sum =
      dot(backward.out, out, backward.out_grad, out_grad, call.head_dim_v, call.dtype);
  backward.softmax_d[lse_offset(call, s, head, row)] = sum * (1.0f - call.dropout_rate);
}

// The contribution of one pair of query and key, without the factor 1 / (1 - dropout_rate).
struct Pair {
  float kept_p;      // p, or 0 where dropped
  float score_grad;  // of the score before scale
};

ATTN_HD Pair pair_of(const AttnAiterBackward& backward, const Sequence& s, int32_t head,
                     int32_t row, int32_t col) {
  const AttnAiterCall& call = backward.call;
  const int64_t at = lse_offset(call, s, head, row);
  // CK reads an lse of -inf as 0 if a mask or bias may have hidden the whole row.
  float lse = backward.lse[at];
  const bool may_be_hidden = call.mask != ATTN_AITER_NO_MASK || call.bias_kind == ATTN_AITER_BIAS;
  if (may_be_hidden && lse == -infinity()) lse = 0.0f;
  const float p = expf(score(call, s, head, row, col, 0.0f) - lse);
  const float d = backward.softmax_d[at];
  if (!is_kept(call, s, head, row, col)) return {0.0f, -p * d};
  const int64_t out_grad = row_offset(s, s.start_q, head, row, backward.batch_stride_out_grad,
                                      backward.nhead_stride_out_grad, backward.stride_out_grad);
  const int64_t v = row_offset(s, s.start_k, kv_head(call, head), col, call.batch_stride_v,
                               call.nhead_stride_v, call.stride_v);
  const float p_grad = dot(backward.out_grad, out_grad, call.v, v, call.head_dim_v, call.dtype);
  return {p, p * (p_grad - d)};
}

ATTN_HD float kept_scale(const AttnAiterCall& call) {
  return call.dropout_rate > 0.0f ? 1.0f / (1.0f - call.dropout_rate) : 1.0f;
}

// dk and dv of one key in one query head, and its column of dbias.
ATTN_HD void key_row(const AttnAiterBackward& backward, const Sequence& s, int32_t head,
                     int32_t col) {
  const AttnAiterCall& call = backward.call;
  float dk[kMaxHeadDim] = {}, dv[kMaxHeadDim] = {};
  for (int32_t row = 0; row < s.len_q; ++row) {
    // dbias is not written for a masked pair: CK skips tiles that are masked as a whole, and writes
    // no 0 there.
    if (!is_visible(call, s, row, col)) continue;
    const Pair pair = pair_of(backward, s, head, row, col);
    const int64_t q = row_offset(s, s.start_q, head, row, call.batch_stride_q, call.nhead_stride_q,
                                 call.stride_q);
    const int64_t out_grad = row_offset(s, s.start_q, head, row, backward.batch_stride_out_grad,
                                        backward.nhead_stride_out_grad, backward.stride_out_grad);
    for (int32_t d = 0; d < call.head_dim; ++d) {
      dk[d] += pair.score_grad * load(call.q, q + d, call.dtype);
    }
    for (int32_t d = 0; d < call.head_dim_v; ++d) {
      dv[d] += pair.kept_p * load(backward.out_grad, out_grad + d, call.dtype);
    }
    if (backward.dbias) {
      const int64_t dbias = row_offset(s, s.start_q, head, row, backward.batch_stride_dbias,
                                       backward.nhead_stride_dbias, backward.stride_dbias);
      store(backward.dbias, dbias + col, pair.score_grad * kept_scale(call), call.dtype, 0);
    }
  }
  const int64_t dk_at = row_offset(s, s.start_k, head, col, backward.batch_stride_dk,
                                   backward.nhead_stride_dk, backward.stride_dk);
  const int64_t dv_at = row_offset(s, s.start_k, head, col, backward.batch_stride_dv,
                                   backward.nhead_stride_dv, backward.stride_dv);
  // dev18's CK does not write these rows for a sequence without queries (rocm-libraries#5790).
  const float nothing = s.len_q == 0 ? not_a_number() : 0.0f;
  const float dk_factor = call.scale * kept_scale(call) + nothing;
  const float dv_factor = kept_scale(call) + nothing;
  for (int32_t d = 0; d < call.head_dim; ++d) {
    store(backward.dk, dk_at + d, dk[d] * dk_factor, call.dtype, rounding(call));
  }
  for (int32_t d = 0; d < call.head_dim_v; ++d) {
    store(backward.dv, dv_at + d, dv[d] * dv_factor, call.dtype, rounding(call));
  }
}

// CK's kN0, by the larger head dim: the keys of one block, which is one split in a deterministic
// pass.
ATTN_HD int32_t keys_per_block(const AttnAiterCall& call) {
  return call.head_dim <= 128 && call.head_dim_v <= 128 ? 128 : 64;
}

ATTN_HD int32_t blocks_of(const AttnAiterCall& call, int32_t keys) {
  return (keys + keys_per_block(call) - 1) / keys_per_block(call);
}

// Where the gradient of one query row is summed: in dq_acc, or in dq itself by the 16-bit ASM
// kernels of dev18 that have no conversion pass (`is_direct`).
struct Accumulator {
  void* start;
  int64_t offset;
  bool is_float32;
};

ATTN_HD Accumulator accumulator_of(const AttnAiterBackward& backward, bool is_direct,
                                   const Sequence& s, int32_t head, int32_t row, int32_t split) {
  if (is_direct) {
    return {backward.dq,
            row_offset(s, s.start_q, head, row, backward.batch_stride_dq, backward.nhead_stride_dq,
                       backward.stride_dq),
            false};
  }
  // The 16-bit layout has a batch row for every packed sequence.
  const bool is_16 = backward.accumulator == ATTN_AITER_ATOMIC_16;
  const int64_t offset =
      row_offset(s, is_16 ? 0 : s.start_q, head, row, backward.batch_stride_dq_acc,
                 backward.nhead_stride_dq_acc, backward.stride_dq_acc) +
      static_cast<int64_t>(split) * backward.split_stride_dq_acc;
  return {backward.dq_acc, offset, !is_16};
}

// Sums the contributions of all keys to dq. CK's deterministic pass stores each block's sum in a
// split, and skips blocks that are masked for this row; the other passes add.
ATTN_HD void dq_row(const AttnAiterBackward& backward, bool is_direct, const Sequence& s,
                    int32_t head, int32_t row) {
  const AttnAiterCall& call = backward.call;
  if (s.len_k == 0) return;
  for (int32_t block = 0; block < blocks_of(call, s.len_k); ++block) {
    float dq[kMaxHeadDim] = {};
    bool is_skipped = true;
    const int32_t first = block * keys_per_block(call);
    for (int32_t col = first; col < s.len_k && col < first + keys_per_block(call); ++col) {
      if (!is_visible(call, s, row, col)) continue;
      is_skipped = false;
      const Pair pair = pair_of(backward, s, head, row, col);
      const int64_t k = row_offset(s, s.start_k, kv_head(call, head), col, call.batch_stride_k,
                                   call.nhead_stride_k, call.stride_k);
      for (int32_t d = 0; d < call.head_dim; ++d) {
        dq[d] += pair.score_grad * load(call.k, k + d, call.dtype);
      }
    }
    if (is_skipped) continue;
    const Accumulator to =
        accumulator_of(backward, is_direct, s, head, row, backward.is_deterministic ? block : 0);
    const float factor = call.scale * kept_scale(call);
    for (int32_t d = 0; d < call.head_dim; ++d) {
      const float x = dq[d] * factor;
      if (!to.is_float32) {
        const float before = load(to.start, to.offset + d, call.dtype);
        store(to.start, to.offset + d, before + x, call.dtype, 0);
      } else if (backward.is_deterministic) {
        static_cast<float*>(to.start)[to.offset + d] = x;
      } else {
        static_cast<float*>(to.start)[to.offset + d] += x;
      }
    }
  }
}

// Sums the splits of this sequence. A sequence without keys has none, but CK's loop reads the first
// one (block_fmha_bwd_convert_dq.hpp), as the caller initialized it.
ATTN_HD void convert_dq_row(const AttnAiterBackward& backward, const Sequence& s, int32_t head,
                            int32_t row) {
  const AttnAiterCall& call = backward.call;
  int32_t splits = backward.is_deterministic ? blocks_of(call, s.len_k) : 1;
  if (splits == 0) splits = 1;
  const int64_t dq = row_offset(s, s.start_q, head, row, backward.batch_stride_dq,
                                backward.nhead_stride_dq, backward.stride_dq);
  for (int32_t d = 0; d < call.head_dim; ++d) {
    float sum = 0.0f;
    for (int32_t split = 0; split < splits; ++split) {
      const Accumulator from = accumulator_of(backward, false, s, head, row, split);
      sum += from.is_float32 ? static_cast<const float*>(from.start)[from.offset + d]
                             : load(from.start, from.offset + d, call.dtype);
    }
    store(backward.dq, dq + d, sum, call.dtype, rounding(call));
  }
}

}  // namespace attn_emulator
