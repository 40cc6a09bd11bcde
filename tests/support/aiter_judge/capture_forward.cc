// Stands where AITER's mha_fwd does and writes down every argument it receives.
#include "mha_fwd.h"
#include "record.h"
#include "write.h"

using judge::Write;

float aiter::mha_fwd(mha_fwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_lse,
                     bool use_ext_asm, int how_v3_bf16_cvt, const void* seqstart_q_padding_ptr,
                     const void* seqstart_k_padding_ptr, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  judge::Record("dtype " + dtype);
  Write("stream", static_cast<const void*>(config.stream_id_));
  Write("time_kernel", config.time_kernel_);
  Write("is_group_mode", is_group_mode);
  Write("mask", static_cast<int>(mask));
  Write("bias", static_cast<int>(bias));
  Write("has_lse", has_lse);
  Write("use_ext_asm", use_ext_asm);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqstart_q_padding_ptr", seqstart_q_padding_ptr);
  Write("seqstart_k_padding_ptr", seqstart_k_padding_ptr);
  Write("q_ptr", args.q_ptr);
  Write("k_ptr", args.k_ptr);
  Write("v_ptr", args.v_ptr);
  Write("bias_ptr", args.bias_ptr);
  Write("rand_val_ptr", args.rand_val_ptr);
  Write("lse_ptr", args.lse_ptr);
  Write("o_ptr", args.o_ptr);
  Write("seqstart_q_ptr", args.seqstart_q_ptr);
  Write("seqstart_k_ptr", args.seqstart_k_ptr);
  Write("seqlen_q_ptr", args.seqlen_q_ptr);
  Write("seqlen_k_ptr", args.seqlen_k_ptr);
  Write("cu_seqlen_q_ptr", args.cu_seqlen_q_ptr);
  Write("cu_seqlen_k_ptr", args.cu_seqlen_k_ptr);
  Write("seqlen_q", args.seqlen_q);
  Write("seqlen_k", args.seqlen_k);
  Write("batch", args.batch);
  Write("max_seqlen_q", args.max_seqlen_q);
  Write("hdim_q", args.hdim_q);
  Write("hdim_v", args.hdim_v);
  Write("nhead_q", args.nhead_q);
  Write("nhead_k", args.nhead_k);
  Write("scale_s", args.scale_s);
  Write("scale_p", args.scale_p);
  Write("scale_o", args.scale_o);
  Write("logits_soft_cap", args.logits_soft_cap);
  Write("stride_q", args.stride_q);
  Write("stride_k", args.stride_k);
  Write("stride_v", args.stride_v);
  Write("stride_bias", args.stride_bias);
  Write("stride_randval", args.stride_randval);
  Write("stride_o", args.stride_o);
  Write("nhead_stride_q", args.nhead_stride_q);
  Write("nhead_stride_k", args.nhead_stride_k);
  Write("nhead_stride_v", args.nhead_stride_v);
  Write("nhead_stride_bias", args.nhead_stride_bias);
  Write("nhead_stride_randval", args.nhead_stride_randval);
  Write("nhead_stride_lse", args.nhead_stride_lse);
  Write("nhead_stride_o", args.nhead_stride_o);
  Write("batch_stride_q", args.batch_stride_q);
  Write("batch_stride_k", args.batch_stride_k);
  Write("batch_stride_v", args.batch_stride_v);
  Write("batch_stride_bias", args.batch_stride_bias);
  Write("batch_stride_randval", args.batch_stride_randval);
  Write("batch_stride_lse", args.batch_stride_lse);
  Write("batch_stride_o", args.batch_stride_o);
  Write("window_size_left", args.window_size_left);
  Write("window_size_right", args.window_size_right);
  Write("mask_type", args.mask_type);
  Write("min_seqlen_q", args.min_seqlen_q);
  Write("p_drop", args.p_drop);
  Write("s_randval", args.s_randval);
  const bool on_device = args.drop_seed_offset.index() == 1;
  Write("drop_on_device", on_device);
  if (on_device) {
    const auto [seed, offset] = std::get<1>(args.drop_seed_offset);
    Write("drop_seed", seed);
    Write("drop_offset", offset);
  } else {
    const auto [seed, offset] = std::get<0>(args.drop_seed_offset);
    Write("drop_seed", seed);
    Write("drop_offset", offset);
  }
  return 0;
}
