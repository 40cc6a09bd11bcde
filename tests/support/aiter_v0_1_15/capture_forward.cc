// Takes the place of AITER's mha_fwd and records every argument that it receives.
#include "mha_fwd.h"
#include "write_args.h"

float aiter::mha_fwd(mha_fwd_args args, const ck_tile::stream_config& config) {
  if (args.v3_api_check) return args.use_asm_v3 ? 1 : -1;
  record::Write("can_throw", aiter_detail::g_aiter_can_throw);
  record::WriteNamed(args, config);
  RECORD_FIELD(how_v3_bf16_cvt);
  RECORD_FIELD(has_lse);
  RECORD_FIELD(qscale_type);
  RECORD_FIELD(has_sink);
  RECORD_FIELD(q_descale_ptr);
  RECORD_FIELD(k_descale_ptr);
  RECORD_FIELD(v_descale_ptr);
  RECORD_FIELD(block_scale_seqstart_q_ptr);
  RECORD_FIELD(block_scale_seqstart_k_ptr);
  RECORD_FIELD(scale_s);
  RECORD_FIELD(logits_soft_cap);
  RECORD_FIELD(nhead_stride_lse);
  RECORD_FIELD(batch_stride_lse);
  RECORD_FIELD(sink_size);
  RECORD_FIELD(min_seqlen_q);
  RECORD_FIELD(s_randval);
  RECORD_FIELD(block_scale_size_q);
  RECORD_FIELD(block_scale_size_kv);
  return 0;
}
