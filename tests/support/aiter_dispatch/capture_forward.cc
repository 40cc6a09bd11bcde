// Takes the place of AITER's mha_fwd and records every argument that it receives.
#include "mha_fwd.h"
#include "write_common.h"

using record::Write;

float aiter::mha_fwd(mha_fwd_args args, const ck_tile::stream_config& config, std::string dtype,
                     bool is_group_mode, mask_enum mask, bias_enum bias, bool has_lse,
                     bool use_ext_asm, int how_v3_bf16_cvt, const void* seqstart_q_padding_ptr,
                     const void* seqstart_k_padding_ptr, bool is_v3_api_check) {
  if (is_v3_api_check) return use_ext_asm ? 1 : -1;
  record::WriteCommon(args, config, dtype, is_group_mode, mask, bias);
  record::WriteTraining(args);
  Write("has_lse", has_lse);
  Write("use_ext_asm", use_ext_asm);
  Write("how_v3_bf16_cvt", how_v3_bf16_cvt);
  Write("seqstart_q_padding_ptr", seqstart_q_padding_ptr);
  Write("seqstart_k_padding_ptr", seqstart_k_padding_ptr);
  RECORD_FIELD(scale_s);
  RECORD_FIELD(scale_p);
  RECORD_FIELD(scale_o);
  RECORD_FIELD(logits_soft_cap);
  RECORD_FIELD(nhead_stride_lse);
  RECORD_FIELD(batch_stride_lse);
  RECORD_FIELD(min_seqlen_q);
  RECORD_FIELD(s_randval);
  return 0;
}
