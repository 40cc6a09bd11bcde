// Takes the place of AITER's mha_fwd_splitkv and records every argument that it receives.
#include "mha_fwd.h"
#include "write_common.h"

using record::Write;

float aiter::mha_fwd_splitkv(mha_fwd_splitkv_args args, const ck_tile::stream_config& config,
                             std::string dtype, bool is_group_mode, mask_enum mask, bias_enum bias,
                             bool has_lse) {
  record::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  Write("has_lse", has_lse);
  RECORD_FIELD(lse_acc_ptr);
  RECORD_FIELD(o_acc_ptr);
  RECORD_FIELD(block_table_ptr);
  RECORD_FIELD(batch_stride_block_table);
  RECORD_FIELD(page_block_size);
  RECORD_FIELD(is_gappy);
  RECORD_FIELD(cache_batch_idx);
  RECORD_FIELD(num_splits);
  RECORD_FIELD(scale_s);
  RECORD_FIELD(scale_p);
  RECORD_FIELD(scale_o);
  RECORD_FIELD(logits_soft_cap);
  RECORD_FIELD(nhead_stride_lse);
  RECORD_FIELD(nhead_stride_lse_acc);
  RECORD_FIELD(batch_stride_lse);
  RECORD_FIELD(batch_stride_lse_acc);
  RECORD_FIELD(split_stride_lse_acc);
  RECORD_FIELD(split_stride_o_acc);
  RECORD_STRIDES(o_acc);
  return 0;
}
