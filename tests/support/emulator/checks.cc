#include "checks.h"

#include <algorithm>

#include "hooks.h"
#include "noted_buffers.h"
#include "scores.h"

namespace attn_emulator {
namespace {

std::string text(int64_t x) { return std::to_string(x); }

bool is_window(const AttnAiterCall& call, int32_t left, int32_t right) {
  return call.window_left == left && call.window_right == right;
}

std::string refusal_of_mode(const AttnAiterCall& call) {
  if (!call.is_group) {
    if (call.seqstart_q || call.seqstart_k || call.seqlen_q || call.seqlen_k || call.cu_seqlen_q ||
        call.cu_seqlen_k) {
      return "seqstart_*, seqlen_* and cu_seqlen_* are of group mode, and is_group is 0";
    }
    if (call.max_seq_len_q != call.seq_len_q || call.max_seq_len_kv != call.seq_len_kv) {
      return "without groups max_seq_len_* must equal seq_len_*";
    }
    return "";
  }
  if (!call.seqstart_q || !call.seqstart_k) return "group mode needs seqstart_q and seqstart_k";
  if (!call.seqlen_q != !call.seqlen_k) return "seqlen_q and seqlen_k must come together";
  if (!call.cu_seqlen_q != !call.cu_seqlen_k) return "cu_seqlen_q and _k must come together";
  if (call.cu_seqlen_q && generation() == "dev18") return "dev18's adapter takes no cu_seqlen_*";
  if (call.seqlen_q && generation() != "dev18") return "lengths must be given as prefix sums";
  if (call.batch_stride_q || call.batch_stride_k || call.batch_stride_v || call.batch_stride_bias ||
      call.batch_stride_out || call.batch_stride_lse) {
    return "batch strides must be 0 in group mode";
  }
  return "";
}

// Refuses combinations for which CK's code generator emits no kernel, or that AITER refuses to ASM.
std::string refusal_of_kernel(const AttnAiterCall& call) {
  if (!call.q || !call.k || !call.v) return "q, k and v must be given";
  if (call.dtype != ATTN_AITER_FP16 && call.dtype != ATTN_AITER_BF16) {
    return "dtype " + text(call.dtype) + " is not one of AttnAiterDtype";
  }
  if (call.num_kv_heads < 1 || call.num_heads % call.num_kv_heads != 0) {
    return text(call.num_heads) + " query heads are no multiple of " + text(call.num_kv_heads) +
           " key/value heads";
  }
  for (int32_t dim : {call.head_dim, call.head_dim_v}) {
    if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0) {
      return "head dim " + text(dim) + ": expected a multiple of 8 up to " + text(kMaxHeadDim);
    }
  }
  if (call.mask < ATTN_AITER_NO_MASK || call.mask > ATTN_AITER_BOTTOM_RIGHT) {
    return "mask " + text(call.mask) + " is not one of AttnAiterMask";
  }
  if (call.mask == ATTN_AITER_NO_MASK && !is_window(call, -1, -1)) {
    return "a window needs a mask kind: AITER ignores it without one";
  }
  if (call.bias_kind < ATTN_AITER_NO_BIAS || call.bias_kind > ATTN_AITER_ALIBI) {
    return "bias_kind " + text(call.bias_kind) + " is not one of AttnAiterBias";
  }
  if ((call.bias_kind != ATTN_AITER_NO_BIAS) != (call.bias != nullptr)) {
    return "bias and bias_kind contradict each other";
  }
  if (!(call.dropout_rate >= 0.0f && call.dropout_rate < 1.0f)) {
    return "dropout_rate " + std::to_string(call.dropout_rate) + " is not in [0, 1)";
  }
  if (call.dropout_rate > 0.0f && !call.rng_state) return "dropout needs rng_state";
  if (call.use_asm) {
    if (call.dropout_rate > 0.0f) return "no ASM kernel has dropout";
    if (call.bias_kind != ATTN_AITER_NO_BIAS) return "no ASM kernel has a bias or ALiBi";
    if (call.seqlen_q) return "no ASM kernel reads seqlen_q and seqlen_k";
    if (call.bf16_rounding < 0 || call.bf16_rounding > 2) {
      return "bf16_rounding " + text(call.bf16_rounding) + " is not 0, 1 or 2";
    }
  }
  return "";
}

std::string refusal_of_call(const AttnAiterCall& call) {
  if (std::string why = refusal_of_kernel(call); !why.empty()) return why;
  return refusal_of_mode(call);
}

// ASM kernels do not get dq_acc's strides: its layout is fixed.
std::string refusal_of_asm_layout(const AttnAiterBackward& backward, const std::string& arch) {
  const AttnAiterCall& call = backward.call;
  const bool is_16 = backward.accumulator == ATTN_AITER_ATOMIC_16;
  if (is_16 && call.head_dim > 128 && call.head_dim != 192) {
    return "no ASM kernel with a 16-bit dq_acc has head dim " + text(call.head_dim);
  }
  if (is_direct(backward, arch)) {
    if (call.is_group) {
      return "dev18 has no 16-bit accumulation of packed sequences here and would run the float32 "
             "kernel over this dq_acc";
    }
    if (backward.stride_dq != call.stride_q || backward.nhead_stride_dq != call.nhead_stride_q ||
        backward.batch_stride_dq != call.batch_stride_q) {
      return "the 16-bit ASM kernel adds to dq itself, with q's strides, and dq has others";
    }
    return "";
  }
  const int64_t rows = is_16 ? (call.max_seq_len_q + 15) / 16 * 16 : call.seq_len_q;
  const int64_t row = !is_16 ? call.head_dim : call.head_dim == 192 ? 192 : 128;
  const int64_t batch = call.is_group && !is_16 ? 0 : call.num_heads * rows * row;
  if (backward.stride_dq_acc != row || backward.nhead_stride_dq_acc != rows * row ||
      backward.batch_stride_dq_acc != batch) {
    return "dq_acc: the ASM kernel knows it as rows of " + text(row) + ", heads of " +
           text(rows * row) + " and batches of " + text(batch) + " elements, and its strides are " +
           text(backward.stride_dq_acc) + ", " + text(backward.nhead_stride_dq_acc) + " and " +
           text(backward.batch_stride_dq_acc);
  }
  return "";
}

std::string misfit_of_array(const Array& array) {
  for (const Axis& axis : array.axes) {
    if (axis.stride < 0) {
      return std::string(array.name) + ": a stride of " + text(axis.stride) + " is negative";
    }
  }
  const int64_t there = noted_bytes_from(array.start);
  if (there < 0) return std::string(array.name) + " points into no buffer of this call";
  if (array.bytes() > there) {
    return std::string(array.name) + ": its shape and strides need " + text(array.bytes()) +
           " bytes and its buffer has " + text(there);
  }
  return "";
}

// Whether two index tuples may address the same element. They do not if every axis, in order of
// strides, steps over everything that the axes before it cover.
bool overlaps_itself(const Array& array) {
  std::vector<Axis> axes;
  for (const Axis& axis : array.axes) {
    if (axis.size > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  int64_t covered = 1;
  for (const Axis& axis : axes) {
    if (axis.stride < covered) return true;
    covered += (axis.size - 1) * axis.stride;
  }
  return false;
}

bool overlap(const Array& a, const Array& b) {
  const auto a_start = reinterpret_cast<uintptr_t>(a.start);
  const auto b_start = reinterpret_cast<uintptr_t>(b.start);
  return a_start < b_start + b.bytes() && b_start < a_start + a.bytes();
}

std::string wrong_side(const char* side, const int32_t* starts, const int32_t* lengths,
                       const int32_t* sums, int32_t batch, int32_t rows, int32_t max_length) {
  const std::string seqstart = std::string("seqstart_") + side,
                    seqlen = std::string("seqlen_") + side;
  if (starts[0] < 0) return seqstart + " begins below 0, at " + text(starts[0]);
  for (int32_t i = 0; i < batch; ++i) {
    const std::string at = "[" + text(i) + "]";
    const int32_t space = starts[i + 1] - starts[i];
    if (space < 0) return seqstart + " decreases after " + at;
    const int32_t length = length_of(i, starts, lengths, sums);
    if (length < 0 || length > space) {
      return seqlen + at + " is " + text(length) + " and there is space for " + text(space);
    }
    if (length > max_length) {
      return "sequence " + text(i) + " has length " + text(length) + " in " + seqstart +
             ", more than max_seq_len " + text(max_length);
    }
  }
  if (starts[batch] > rows) {
    return seqstart + " ends at " + text(starts[batch]) + " and there are " + text(rows) + " rows";
  }
  return "";
}

}  // namespace

bool is_direct(const AttnAiterBackward& backward, const std::string& arch) {
  return backward.accumulator == ATTN_AITER_ATOMIC_16 &&
         (arch == "gfx942" || backward.call.head_dim <= 64);
}

std::string refusal(const AttnAiterForward& forward) {
  const AttnAiterCall& call = forward.call;
  if (std::string why = refusal_of_call(call); !why.empty()) return why;
  if (!forward.out) return "out must be given";
  const bool has_soft_cap = forward.logits_soft_cap != 0.0f;
  if (has_soft_cap && call.bias_kind != ATTN_AITER_NO_BIAS) {
    return "CK has no kernel with a soft cap and a bias or ALiBi";
  }
  if (call.use_asm && has_soft_cap) return "no ASM kernel has a soft cap";
  if (call.use_asm && !is_window(call, -1, -1) && !is_window(call, -1, 0)) {
    return "no forward ASM kernel has a window";
  }
  return "";
}

std::string refusal(const AttnAiterBackward& backward, const std::string& arch) {
  const AttnAiterCall& call = backward.call;
  if (std::string why = refusal_of_call(call); !why.empty()) return why;
  if (!backward.out || !backward.lse || !backward.out_grad || !backward.dq || !backward.dk ||
      !backward.dv || !backward.softmax_d || !backward.dq_acc) {
    return "out, lse, out_grad, dq, dk, dv, softmax_d and dq_acc must be given";
  }
  if (backward.dbias && call.bias_kind != ATTN_AITER_BIAS) return "dbias needs a bias";
  const bool is_split = backward.accumulator == ATTN_AITER_SPLIT;
  if (call.use_asm && is_split) return "an ASM kernel does not know CK's layout of dq_acc";
  if (!call.use_asm && !is_split) return "CK does not know the ASM kernels' layout of dq_acc";
  if (call.use_asm && backward.is_deterministic) return "no ASM kernel is deterministic";
  if (call.is_group &&
      (backward.batch_stride_out_grad || backward.batch_stride_dq || backward.batch_stride_dk ||
       backward.batch_stride_dv || backward.batch_stride_dbias ||
       (backward.batch_stride_dq_acc && backward.accumulator != ATTN_AITER_ATOMIC_16))) {
    return "batch strides must be 0 in group mode";
  }
  if (!call.use_asm) return "";
  if (call.is_group && !is_window(call, -1, -1) && !is_window(call, -1, 0)) {
    return "no ASM kernel for packed sequences has a window";
  }
  return refusal_of_asm_layout(backward, arch);
}

std::string refusal(const AttnAiterSplitKv& split) {
  const AttnAiterCall& call = split.call;
  if (std::string why = refusal_of_kernel(call); !why.empty()) return why;
  if (!split.out || !split.lse_acc || !split.out_acc) return "out and the scratch must be given";
  if (call.is_group || call.seqstart_q || call.seqstart_k || call.seqlen_q) {
    return "split-KV is called without groups here";
  }
  if (!call.seqlen_k) return "split-KV needs seqlen_k";
  if (call.max_seq_len_q != call.seq_len_q || call.max_seq_len_kv != call.seq_len_kv) {
    return "without groups max_seq_len_* must equal seq_len_*";
  }
  if (call.use_asm || call.bf16_rounding) return "there are no ASM kernels for split-KV";
  if (call.dropout_rate > 0.0f) return "split-KV has no dropout";
  if (call.bias_kind == ATTN_AITER_BIAS) return "split-KV takes no bias here";
  if (split.logits_soft_cap != 0.0f && call.bias_kind != ATTN_AITER_NO_BIAS) {
    return "CK has no kernel with a soft cap and a bias or ALiBi";
  }
  if (split.num_splits < 1 || split.num_splits > 128) {
    return text(split.num_splits) + " splits: CK combines 1 to 128";
  }
  if (!split.page_table) {
    return split.page_size || split.num_pages || split.batch_stride_page_table
               ? "pages without a page table"
               : "";
  }
  // A tile of keys must not reach into the next page (page_block_navigator.hpp).
  if (split.page_size < 1 || split.page_size % 128 != 0) {
    return "pages of " + text(split.page_size) + " keys: expected a multiple of 128";
  }
  if (call.seq_len_kv % split.page_size != 0) return "seq_len_kv: expected whole pages";
  return "";
}

std::string misfit(const std::vector<Array>& arrays) {
  for (const Array& array : arrays) {
    if (array.is_empty()) continue;
    if (std::string why = misfit_of_array(array); !why.empty()) return why;
  }
  for (const Array& result : arrays) {
    if (result.access == Access::kRead || result.is_empty()) continue;
    if (overlaps_itself(result)) return std::string(result.name) + " overlaps itself";
    for (const Array& other : arrays) {
      if (other.start == result.start && other.name == result.name) continue;
      if (!other.is_empty() && overlap(result, other)) {
        return std::string(result.name) + " overlaps " + other.name;
      }
    }
  }
  return "";
}

std::string wrong_pages(const AttnAiterSplitKv& split) {
  const AttnAiterCall& call = split.call;
  for (int32_t row = 0; row < call.batch; ++row) {
    const int32_t length = call.seqlen_k[row];
    if (length < 0 || length > call.seq_len_kv) {
      return "seqlen_k[" + text(row) + "] is " + text(length) + " and there is space for " +
             text(call.seq_len_kv);
    }
    for (int32_t i = 0; split.page_table && i * split.page_size < length; ++i) {
      const int32_t page =
          split.page_table[static_cast<int64_t>(row) * split.batch_stride_page_table + i];
      if (page < 0 || page >= split.num_pages) {
        return "page_table[" + text(row) + ", " + text(i) + "] is " + text(page) +
               " and there are " + text(split.num_pages) + " pages";
      }
    }
  }
  return "";
}

std::string wrong_sequences(const AttnAiterCall& call) {
  if (!call.is_group) return "";
  std::string why = wrong_side("q", call.seqstart_q, call.seqlen_q, call.cu_seqlen_q, call.batch,
                               call.seq_len_q, call.max_seq_len_q);
  if (!why.empty()) return why;
  return wrong_side("k", call.seqstart_k, call.seqlen_k, call.cu_seqlen_k, call.batch,
                    call.seq_len_kv, call.max_seq_len_kv);
}

}  // namespace attn_emulator
