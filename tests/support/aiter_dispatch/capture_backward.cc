// Takes the place of AITER's mha_bwd and records every argument that it receives.
#include "mha_bwd.h"
#include "write_common.h"

using record::Write;

float aiter::mha_bwd(mha_bwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_dbias,
                     bool is_store_randval, bool deterministic, bool use_ext_asm,
                     bool is_v3_atomic_fp32, int how_v3_bf16_cvt, const void* seqlen_q_padded,
                     const void* seqlen_k_padded, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  record::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  record::WriteTraining(args);
  Write("has_dbias", has_dbias);
  Write("is_store_randval", is_store_randval);
  Write("deterministic", deterministic);
  Write("use_ext_asm", use_ext_asm);
  Write("is_v3_atomic_fp32", is_v3_atomic_fp32);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqlen_q_padded", seqlen_q_padded);
  Write("seqlen_k_padded", seqlen_k_padded);
  RECORD_FIELD(do_ptr);
  RECORD_FIELD(d_ptr);
  RECORD_FIELD(dq_ptr);
  RECORD_FIELD(dk_ptr);
  RECORD_FIELD(dv_ptr);
  RECORD_FIELD(dbias_ptr);
  RECORD_FIELD(dq_acc_ptr);
  RECORD_FIELD(max_seqlen_k);
  RECORD_FIELD(scale);
  RECORD_FIELD(nhead_stride_lsed);
  RECORD_FIELD(batch_stride_lsed);
  RECORD_FIELD(split_stride_dq_acc);
  RECORD_FIELD(p_undrop);
  RECORD_STRIDES(do);
  RECORD_STRIDES(dq_acc);
  RECORD_STRIDES(dq);
  RECORD_STRIDES(dk);
  RECORD_STRIDES(dv);
  RECORD_STRIDES(dbias);
  return 0;
}
