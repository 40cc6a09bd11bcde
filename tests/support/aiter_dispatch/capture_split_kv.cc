// Takes the place of AITER's mha_fwd_splitkv and records every argument that it receives.
#include "mha_fwd.h"
#include "write_common.h"

using judge::Write;

float aiter::mha_fwd_splitkv(mha_fwd_splitkv_args args, const ck_tile::stream_config& config,
                             std::string dtype, bool is_group_mode, mask_enum mask, bias_enum bias,
                             bool has_lse) {
  judge::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  Write("has_lse", has_lse);
  JUDGE_WRITE(lse_acc_ptr);
  JUDGE_WRITE(o_acc_ptr);
  JUDGE_WRITE(block_table_ptr);
  JUDGE_WRITE(batch_stride_block_table);
  JUDGE_WRITE(page_block_size);
  JUDGE_WRITE(is_gappy);
  JUDGE_WRITE(cache_batch_idx);
  JUDGE_WRITE(num_splits);
  JUDGE_WRITE(scale_s);
  JUDGE_WRITE(scale_p);
  JUDGE_WRITE(scale_o);
  JUDGE_WRITE(logits_soft_cap);
  JUDGE_WRITE(nhead_stride_lse);
  JUDGE_WRITE(nhead_stride_lse_acc);
  JUDGE_WRITE(batch_stride_lse);
  JUDGE_WRITE(batch_stride_lse_acc);
  JUDGE_WRITE(split_stride_lse_acc);
  JUDGE_WRITE(split_stride_o_acc);
  JUDGE_WRITE_STRIDES(o_acc);
  return 0;
}
