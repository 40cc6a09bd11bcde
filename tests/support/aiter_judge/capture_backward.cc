// Stands where AITER's mha_bwd does and writes down every argument it receives.
#include "mha_bwd.h"
#include "record.h"
#include "write.h"

using judge::Write;

float aiter::mha_bwd(mha_bwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_dbias,
                     bool is_store_randval, bool deterministic, bool use_ext_asm,
                     bool is_v3_atomic_fp32, int how_v3_bf16_cvt, const void* seqlen_q_padded,
                     const void* seqlen_k_padded, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  judge::Record("dtype " + dtype);
  Write("stream", static_cast<const void*>(config.stream_id_));
  Write("time_kernel", config.time_kernel_);
  Write("is_group_mode", is_group_mode);
  Write("mask", static_cast<int>(mask));
  Write("bias", static_cast<int>(bias));
  Write("has_dbias", has_dbias);
  Write("is_store_randval", is_store_randval);
  Write("deterministic", deterministic);
  Write("use_ext_asm", use_ext_asm);
  Write("is_v3_atomic_fp32", is_v3_atomic_fp32);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqlen_q_padded", seqlen_q_padded);
  Write("seqlen_k_padded", seqlen_k_padded);
  Write("q_ptr", args.q_ptr);
  Write("k_ptr", args.k_ptr);
  Write("v_ptr", args.v_ptr);
  Write("bias_ptr", args.bias_ptr);
  Write("o_ptr", args.o_ptr);
  Write("lse_ptr", args.lse_ptr);
  Write("do_ptr", args.do_ptr);
  Write("d_ptr", args.d_ptr);
  Write("rand_val_ptr", args.rand_val_ptr);
  Write("dq_ptr", args.dq_ptr);
  Write("dk_ptr", args.dk_ptr);
  Write("dv_ptr", args.dv_ptr);
  Write("dbias_ptr", args.dbias_ptr);
  Write("dq_acc_ptr", args.dq_acc_ptr);
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
  Write("max_seqlen_k", args.max_seqlen_k);
  Write("hdim_q", args.hdim_q);
  Write("hdim_v", args.hdim_v);
  Write("nhead_q", args.nhead_q);
  Write("nhead_k", args.nhead_k);
  Write("scale", args.scale);
  Write("stride_q", args.stride_q);
  Write("stride_k", args.stride_k);
  Write("stride_v", args.stride_v);
  Write("stride_bias", args.stride_bias);
  Write("stride_o", args.stride_o);
  Write("stride_randval", args.stride_randval);
  Write("stride_do", args.stride_do);
  Write("stride_dq_acc", args.stride_dq_acc);
  Write("stride_dq", args.stride_dq);
  Write("stride_dk", args.stride_dk);
  Write("stride_dv", args.stride_dv);
  Write("stride_dbias", args.stride_dbias);
  Write("nhead_stride_q", args.nhead_stride_q);
  Write("nhead_stride_k", args.nhead_stride_k);
  Write("nhead_stride_v", args.nhead_stride_v);
  Write("nhead_stride_bias", args.nhead_stride_bias);
  Write("nhead_stride_o", args.nhead_stride_o);
  Write("nhead_stride_randval", args.nhead_stride_randval);
  Write("nhead_stride_do", args.nhead_stride_do);
  Write("nhead_stride_lsed", args.nhead_stride_lsed);
  Write("nhead_stride_dq_acc", args.nhead_stride_dq_acc);
  Write("nhead_stride_dq", args.nhead_stride_dq);
  Write("nhead_stride_dk", args.nhead_stride_dk);
  Write("nhead_stride_dv", args.nhead_stride_dv);
  Write("nhead_stride_dbias", args.nhead_stride_dbias);
  Write("batch_stride_q", args.batch_stride_q);
  Write("batch_stride_k", args.batch_stride_k);
  Write("batch_stride_v", args.batch_stride_v);
  Write("batch_stride_bias", args.batch_stride_bias);
  Write("batch_stride_o", args.batch_stride_o);
  Write("batch_stride_randval", args.batch_stride_randval);
  Write("batch_stride_do", args.batch_stride_do);
  Write("batch_stride_lsed", args.batch_stride_lsed);
  Write("batch_stride_dq_acc", args.batch_stride_dq_acc);
  Write("batch_stride_dq", args.batch_stride_dq);
  Write("batch_stride_dk", args.batch_stride_dk);
  Write("batch_stride_dv", args.batch_stride_dv);
  Write("batch_stride_dbias", args.batch_stride_dbias);
  Write("split_stride_dq_acc", args.split_stride_dq_acc);
  Write("window_size_left", args.window_size_left);
  Write("window_size_right", args.window_size_right);
  Write("mask_type", args.mask_type);
  Write("p_drop", args.p_drop);
  Write("p_undrop", args.p_undrop);
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
