// Shared parts of both directions: the place of a sequence, the keys that a query sees, and the
// score of one pair. Every address is the array's start plus indices times the strides of the call.
#pragma once

#include "numbers.h"

namespace attn_emulator {

constexpr int32_t kMaxHeadDim = 256;

// One batch row, or one packed sequence.
struct Sequence {
  int32_t index;
  int64_t start_q;  // group mode: the row at which it starts
  int64_t start_k;
  int32_t len_q;
  int32_t len_k;
};

// The rows of a sequence: its length, given by itself or as a difference of prefix sums, or else
// all up to the next start.
ATTN_HD int32_t length_of(int32_t index, const int32_t* starts, const int32_t* lengths,
                          const int32_t* sums) {
  if (lengths) return lengths[index];
  if (!sums) sums = starts;
  return sums[index + 1] - sums[index];
}

ATTN_HD Sequence sequence_of(const AttnAiterCall& call, int32_t index) {
  if (!call.is_group) return {index, 0, 0, call.seq_len_q, call.seq_len_kv};
  Sequence s{index, call.seqstart_q[index], call.seqstart_k[index], 0, 0};
  s.len_q = length_of(index, call.seqstart_q, call.seqlen_q, call.cu_seqlen_q);
  s.len_k = length_of(index, call.seqstart_k, call.seqlen_k, call.cu_seqlen_k);
  return s;
}

// The offset of one row of one head. In group mode a sequence starts at a row and the batch stride
// is 0; otherwise it starts at a multiple of the batch stride.
ATTN_HD int64_t row_offset(const Sequence& s, int64_t start, int32_t head, int32_t row,
                           int64_t batch_stride, int64_t nhead_stride, int64_t stride) {
  return s.index * batch_stride + head * nhead_stride + (start + row) * stride;
}

ATTN_HD int64_t lse_offset(const AttnAiterCall& call, const Sequence& s, int32_t head,
                           int32_t row) {
  return row_offset(s, s.start_q, head, row, call.batch_stride_lse, call.nhead_stride_lse, 1);
}

ATTN_HD int32_t kv_head(const AttnAiterCall& call, int32_t head) {
  return head / (call.num_heads / call.num_kv_heads);
}

// How stores round. Only ASM kernels have a choice.
ATTN_HD int rounding(const AttnAiterCall& call) { return call.use_asm ? call.bf16_rounding : 0; }

// As in block_masking.hpp: the diagonal starts at the top left, or ends at the bottom right of this
// sequence's lengths; a negative side of the window is open.
ATTN_HD bool is_visible(const AttnAiterCall& call, const Sequence& s, int32_t row, int32_t col) {
  if (col >= s.len_k) return false;
  if (call.mask == ATTN_AITER_NO_MASK) return true;
  const int64_t shift = call.mask == ATTN_AITER_BOTTOM_RIGHT ? s.len_k - s.len_q : 0;
  const int64_t distance = col - (row + shift);
  return (call.window_left < 0 || distance >= -static_cast<int64_t>(call.window_left)) &&
         (call.window_right < 0 || distance <= call.window_right);
}

// As in block_position_encoding.hpp. The mode follows from the mask (make_alibi_from_lr_mask).
// Causal rows see only keys to the left, so CK adds slope * col there, which differs from -slope *
// |distance| by a constant per row: softmax is the same, and lse is not.
ATTN_HD float alibi(const AttnAiterCall& call, const Sequence& s, float slope, int32_t row,
                    int32_t col) {
  const bool is_masked = call.mask != ATTN_AITER_NO_MASK;
  int64_t zero = row, position = col;
  if (is_masked && call.window_left < 0 && call.window_right == 0) {
    slope = -slope;
    zero = 0;
  } else if (!is_masked || call.mask == ATTN_AITER_BOTTOM_RIGHT) {
    if (s.len_k > s.len_q) zero += s.len_k - s.len_q;
    if (s.len_q > s.len_k) position += s.len_q - s.len_k;
  }
  // CK subtracts 16-bit positions (LogMaxSadOprndSize): beyond 65535 they wrap.
  const int32_t distance = static_cast<uint16_t>(zero) - static_cast<uint16_t>(position);
  return -slope * static_cast<float>(distance < 0 ? -distance : distance);
}

ATTN_HD float dot(const void* a, int64_t a_offset, const void* b, int64_t b_offset, int32_t count,
                  int32_t dtype) {
  float sum = 0.0f;
  for (int32_t d = 0; d < count; ++d) {
    sum += load(a, a_offset + d, dtype) * load(b, b_offset + d, dtype);
  }
  return sum;
}

// scale * q . k, then soft cap, bias or ALiBi. CK has no kernel with a soft cap and a bias.
ATTN_HD float score(const AttnAiterCall& call, const Sequence& s, int32_t head, int32_t row,
                    int32_t col, float soft_cap) {
  const int64_t q =
      row_offset(s, s.start_q, head, row, call.batch_stride_q, call.nhead_stride_q, call.stride_q);
  const int64_t k = row_offset(s, s.start_k, kv_head(call, head), col, call.batch_stride_k,
                               call.nhead_stride_k, call.stride_k);
  float x = call.scale * dot(call.q, q, call.k, k, call.head_dim, call.dtype);
  if (soft_cap > 0.0f) x = soft_cap * tanhf(x / soft_cap);
  if (call.bias_kind == ATTN_AITER_BIAS) {
    const int64_t bias = row_offset(s, s.start_q, head, row, call.batch_stride_bias,
                                    call.nhead_stride_bias, call.stride_bias);
    x += load(call.bias, bias + col, call.dtype);
  } else if (call.bias_kind == ATTN_AITER_ALIBI) {
    const int64_t at = static_cast<int64_t>(s.index) * call.stride_bias + head;
    x += alibi(call, s, static_cast<const float*>(call.bias)[at], row, col);
  }
  return x;
}

ATTN_HD bool is_kept(const AttnAiterCall& call, const Sequence& s, int32_t head, int32_t row,
                     int32_t col) {
  if (!(call.dropout_rate > 0.0f)) return true;
  return is_kept(call.rng_state[0], call.rng_state[1], s.index, head, row, col, call.dropout_rate);
}

}  // namespace attn_emulator
