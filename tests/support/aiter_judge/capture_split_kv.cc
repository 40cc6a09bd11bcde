// Stands where AITER's mha_fwd_splitkv does and writes down every argument it receives.
#include "mha_fwd.h"
#include "record.h"
#include "write.h"

using judge::Write;

float aiter::mha_fwd_splitkv(mha_fwd_splitkv_args args, const ck_tile::stream_config& config,
                             std::string dtype, bool is_group_mode, mask_enum mask, bias_enum bias,
                             bool has_lse) {
  judge::Record("dtype " + dtype);
  Write("stream", static_cast<const void*>(config.stream_id_));
  Write("time_kernel", config.time_kernel_);
  Write("is_group_mode", is_group_mode);
  Write("mask", static_cast<int>(mask));
  Write("bias", static_cast<int>(bias));
  Write("has_lse", has_lse);
  Write("q_ptr", static_cast<const void*>(args.q_ptr));
  Write("k_ptr", static_cast<const void*>(args.k_ptr));
  Write("v_ptr", static_cast<const void*>(args.v_ptr));
  Write("bias_ptr", static_cast<const void*>(args.bias_ptr));
  Write("lse_acc_ptr", static_cast<const void*>(args.lse_acc_ptr));
  Write("o_acc_ptr", static_cast<const void*>(args.o_acc_ptr));
  Write("lse_ptr", static_cast<const void*>(args.lse_ptr));
  Write("o_ptr", static_cast<const void*>(args.o_ptr));
  Write("block_table_ptr", static_cast<const void*>(args.block_table_ptr));
  Write("batch_stride_block_table", args.batch_stride_block_table);
  Write("page_block_size", args.page_block_size);
  Write("is_gappy", args.is_gappy);
  Write("cache_batch_idx", args.cache_batch_idx);
  Write("seqstart_q_ptr", static_cast<const void*>(args.seqstart_q_ptr));
  Write("seqstart_k_ptr", static_cast<const void*>(args.seqstart_k_ptr));
  Write("seqlen_k_ptr", static_cast<const void*>(args.seqlen_k_ptr));
  Write("seqlen_q", args.seqlen_q);
  Write("seqlen_k", args.seqlen_k);
  Write("batch", args.batch);
  Write("max_seqlen_q", args.max_seqlen_q);
  Write("hdim_q", args.hdim_q);
  Write("hdim_v", args.hdim_v);
  Write("nhead_q", args.nhead_q);
  Write("nhead_k", args.nhead_k);
  Write("num_splits", args.num_splits);
  Write("scale_s", args.scale_s);
  Write("scale_p", args.scale_p);
  Write("scale_o", args.scale_o);
  Write("logits_soft_cap", args.logits_soft_cap);
  Write("stride_q", args.stride_q);
  Write("stride_k", args.stride_k);
  Write("stride_v", args.stride_v);
  Write("stride_bias", args.stride_bias);
  Write("stride_o_acc", args.stride_o_acc);
  Write("stride_o", args.stride_o);
  Write("nhead_stride_q", args.nhead_stride_q);
  Write("nhead_stride_k", args.nhead_stride_k);
  Write("nhead_stride_v", args.nhead_stride_v);
  Write("nhead_stride_bias", args.nhead_stride_bias);
  Write("nhead_stride_lse", args.nhead_stride_lse);
  Write("nhead_stride_lse_acc", args.nhead_stride_lse_acc);
  Write("nhead_stride_o_acc", args.nhead_stride_o_acc);
  Write("nhead_stride_o", args.nhead_stride_o);
  Write("batch_stride_q", args.batch_stride_q);
  Write("batch_stride_k", args.batch_stride_k);
  Write("batch_stride_v", args.batch_stride_v);
  Write("batch_stride_bias", args.batch_stride_bias);
  Write("batch_stride_lse", args.batch_stride_lse);
  Write("batch_stride_lse_acc", args.batch_stride_lse_acc);
  Write("batch_stride_o_acc", args.batch_stride_o_acc);
  Write("batch_stride_o", args.batch_stride_o);
  Write("split_stride_lse_acc", args.split_stride_lse_acc);
  Write("split_stride_o_acc", args.split_stride_o_acc);
  Write("window_size_left", args.window_size_left);
  Write("window_size_right", args.window_size_right);
  Write("mask_type", args.mask_type);
  return 0;
}
