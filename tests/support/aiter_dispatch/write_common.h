// The arguments that AITER's entry points have in common, recorded by name.
#pragma once

#include <string>
#include <variant>

#include "record.h"
#include "write.h"

// Records the field of `args` that has this name.
#define RECORD_FIELD(name) record::Write(#name, args.name)
// Records the fields of `args` for one tensor: the strides of its rows, heads and batch rows.
#define RECORD_STRIDES(tensor)         \
  RECORD_FIELD(stride_##tensor);       \
  RECORD_FIELD(nhead_stride_##tensor); \
  RECORD_FIELD(batch_stride_##tensor)

namespace record {

template <typename Args, typename Config, typename Mask, typename Bias>
void WriteCommon(const Args& args, const Config& config, const std::string& dtype,
                 bool is_group_mode, Mask mask, Bias bias) {
  Record("dtype " + dtype);
  Write("stream", static_cast<const void*>(config.stream_id_));
  Write("time_kernel", config.time_kernel_);
  Write("is_group_mode", is_group_mode);
  Write("mask", static_cast<int>(mask));
  Write("bias", static_cast<int>(bias));
  RECORD_FIELD(q_ptr);
  RECORD_FIELD(k_ptr);
  RECORD_FIELD(v_ptr);
  RECORD_FIELD(bias_ptr);
  RECORD_FIELD(o_ptr);
  RECORD_FIELD(lse_ptr);
  RECORD_FIELD(seqstart_q_ptr);
  RECORD_FIELD(seqstart_k_ptr);
  RECORD_FIELD(seqlen_k_ptr);
  RECORD_FIELD(seqlen_q);
  RECORD_FIELD(seqlen_k);
  RECORD_FIELD(batch);
  RECORD_FIELD(max_seqlen_q);
  RECORD_FIELD(hdim_q);
  RECORD_FIELD(hdim_v);
  RECORD_FIELD(nhead_q);
  RECORD_FIELD(nhead_k);
  RECORD_STRIDES(q);
  RECORD_STRIDES(k);
  RECORD_STRIDES(v);
  RECORD_STRIDES(bias);
  RECORD_STRIDES(o);
  RECORD_FIELD(window_size_left);
  RECORD_FIELD(window_size_right);
  RECORD_FIELD(mask_type);
}

// The pointers that split-KV calls do not have, and dropout.
template <typename Args>
void WriteTraining(const Args& args) {
  RECORD_FIELD(seqlen_q_ptr);
  RECORD_FIELD(cu_seqlen_q_ptr);
  RECORD_FIELD(cu_seqlen_k_ptr);
  RECORD_FIELD(rand_val_ptr);
  RECORD_STRIDES(randval);
  RECORD_FIELD(p_drop);
  Write("drop_on_device", args.drop_seed_offset.index() == 1);
  std::visit(
      [](const auto& pair) {
        const auto& [seed, offset] = pair;
        Write("drop_seed", seed);
        Write("drop_offset", offset);
      },
      args.drop_seed_offset);
}

}  // namespace record
