// The arguments that AITER's entry points have in common, recorded by name.
#pragma once

#include <string>
#include <variant>

#include "record.h"
#include "write.h"

// Records the field of `args` that has this name.
#define JUDGE_WRITE(name) judge::Write(#name, args.name)
// Records the fields of `args` for one tensor: the strides of its rows, heads and batch rows.
#define JUDGE_WRITE_STRIDES(tensor)   \
  JUDGE_WRITE(stride_##tensor);       \
  JUDGE_WRITE(nhead_stride_##tensor); \
  JUDGE_WRITE(batch_stride_##tensor)

namespace judge {

template <typename Args, typename Config, typename Mask, typename Bias>
void WriteCommon(const Args& args, const Config& config, const std::string& dtype,
                 bool is_group_mode, Mask mask, Bias bias) {
  Record("dtype " + dtype);
  Write("stream", static_cast<const void*>(config.stream_id_));
  Write("time_kernel", config.time_kernel_);
  Write("is_group_mode", is_group_mode);
  Write("mask", static_cast<int>(mask));
  Write("bias", static_cast<int>(bias));
  JUDGE_WRITE(q_ptr);
  JUDGE_WRITE(k_ptr);
  JUDGE_WRITE(v_ptr);
  JUDGE_WRITE(bias_ptr);
  JUDGE_WRITE(o_ptr);
  JUDGE_WRITE(lse_ptr);
  JUDGE_WRITE(seqstart_q_ptr);
  JUDGE_WRITE(seqstart_k_ptr);
  JUDGE_WRITE(seqlen_k_ptr);
  JUDGE_WRITE(seqlen_q);
  JUDGE_WRITE(seqlen_k);
  JUDGE_WRITE(batch);
  JUDGE_WRITE(max_seqlen_q);
  JUDGE_WRITE(hdim_q);
  JUDGE_WRITE(hdim_v);
  JUDGE_WRITE(nhead_q);
  JUDGE_WRITE(nhead_k);
  JUDGE_WRITE_STRIDES(q);
  JUDGE_WRITE_STRIDES(k);
  JUDGE_WRITE_STRIDES(v);
  JUDGE_WRITE_STRIDES(bias);
  JUDGE_WRITE_STRIDES(o);
  JUDGE_WRITE(window_size_left);
  JUDGE_WRITE(window_size_right);
  JUDGE_WRITE(mask_type);
}

// The pointers that split-KV calls do not have, and dropout.
template <typename Args>
void WriteTraining(const Args& args) {
  JUDGE_WRITE(seqlen_q_ptr);
  JUDGE_WRITE(cu_seqlen_q_ptr);
  JUDGE_WRITE(cu_seqlen_k_ptr);
  JUDGE_WRITE(rand_val_ptr);
  JUDGE_WRITE_STRIDES(randval);
  JUDGE_WRITE(p_drop);
  Write("drop_on_device", args.drop_seed_offset.index() == 1);
  std::visit(
      [](const auto& pair) {
        const auto& [seed, offset] = pair;
        Write("drop_seed", seed);
        Write("drop_offset", offset);
      },
      args.drop_seed_offset);
}

}  // namespace judge
