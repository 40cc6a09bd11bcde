// Takes the place of AITER's mha_bwd and records every argument that it receives.
#include "mha_bwd.h"
#include "write_args.h"

// The switch of the calling thread.
extern "C" int capture_can_throw() { return aiter_detail::g_aiter_can_throw; }

float aiter::mha_bwd(mha_bwd_args args, const ck_tile::stream_config& config) {
  if (args.v3_api_check) return args.use_asm_v3 ? 1 : -1;
  record::Write("can_throw", aiter_detail::g_aiter_can_throw);
  record::WriteNamed(args, config);
  record::Write("scratch", args.workspace_alloc(1, /*zero_init=*/true));
  record::Write("has_pinned", static_cast<bool>(args.pinned_host_alloc));
  RECORD_FIELD(v3_atomic_fp32);
  RECORD_FIELD(v3_bf16_cvt);
  RECORD_FIELD(has_dbias);
  RECORD_FIELD(has_dropout);
  RECORD_FIELD(is_store_randval);
  RECORD_FIELD(is_deterministic);
  RECORD_FIELD(d_sink_ptr);
  RECORD_FIELD(do_ptr);
  RECORD_FIELD(d_ptr);
  RECORD_FIELD(dq_ptr);
  RECORD_FIELD(dk_ptr);
  RECORD_FIELD(dv_ptr);
  RECORD_FIELD(dbias_ptr);
  RECORD_FIELD(max_seqlen_k);
  RECORD_FIELD(scale);
  RECORD_FIELD(nhead_stride_lsed);
  RECORD_FIELD(batch_stride_lsed);
  RECORD_FIELD(p_undrop);
  RECORD_STRIDES(do);
  RECORD_STRIDES(dq);
  RECORD_STRIDES(dk);
  RECORD_STRIDES(dv);
  RECORD_STRIDES(dbias);
  return 0;
}
