// Takes the place of AITER's mha_fwd and records every argument that it receives.
#include "mha_fwd.h"
#include "write_common.h"

using judge::Write;

float aiter::mha_fwd(mha_fwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_lse,
                     bool use_ext_asm, int how_v3_bf16_cvt, const void* seqstart_q_padding_ptr,
                     const void* seqstart_k_padding_ptr, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  judge::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  judge::WriteTraining(args);
  Write("has_lse", has_lse);
  Write("use_ext_asm", use_ext_asm);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqstart_q_padding_ptr", seqstart_q_padding_ptr);
  Write("seqstart_k_padding_ptr", seqstart_k_padding_ptr);
  JUDGE_WRITE(scale_s);
  JUDGE_WRITE(scale_p);
  JUDGE_WRITE(scale_o);
  JUDGE_WRITE(logits_soft_cap);
  JUDGE_WRITE(nhead_stride_lse);
  JUDGE_WRITE(batch_stride_lse);
  JUDGE_WRITE(min_seqlen_q);
  JUDGE_WRITE(s_randval);
  return 0;
}
