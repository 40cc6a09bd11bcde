// Takes the place of AITER's mha_bwd and records every argument that it receives.
#include "mha_bwd.h"
#include "write_common.h"

using judge::Write;

float aiter::mha_bwd(mha_bwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_dbias,
                     bool is_store_randval, bool deterministic, bool use_ext_asm,
                     bool is_v3_atomic_fp32, int how_v3_bf16_cvt, const void* seqlen_q_padded,
                     const void* seqlen_k_padded, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  judge::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  judge::WriteTraining(args);
  Write("has_dbias", has_dbias);
  Write("is_store_randval", is_store_randval);
  Write("deterministic", deterministic);
  Write("use_ext_asm", use_ext_asm);
  Write("is_v3_atomic_fp32", is_v3_atomic_fp32);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqlen_q_padded", seqlen_q_padded);
  Write("seqlen_k_padded", seqlen_k_padded);
  JUDGE_WRITE(do_ptr);
  JUDGE_WRITE(d_ptr);
  JUDGE_WRITE(dq_ptr);
  JUDGE_WRITE(dk_ptr);
  JUDGE_WRITE(dv_ptr);
  JUDGE_WRITE(dbias_ptr);
  JUDGE_WRITE(dq_acc_ptr);
  JUDGE_WRITE(max_seqlen_k);
  JUDGE_WRITE(scale);
  JUDGE_WRITE(nhead_stride_lsed);
  JUDGE_WRITE(batch_stride_lsed);
  JUDGE_WRITE(split_stride_dq_acc);
  JUDGE_WRITE(p_undrop);
  JUDGE_WRITE_STRIDES(do);
  JUDGE_WRITE_STRIDES(dq_acc);
  JUDGE_WRITE_STRIDES(dq);
  JUDGE_WRITE_STRIDES(dk);
  JUDGE_WRITE_STRIDES(dv);
  JUDGE_WRITE_STRIDES(dbias);
  return 0;
}
