// What AITER's forward library holds besides, and nothing here calls.
#include "mha_fwd.h"

float fmha_fwd_splitkv(fmha_fwd_splitkv_traits, fmha_fwd_splitkv_args,
                       const ck_tile::stream_config&) {
  return -1;
}

float fmha_batch_prefill(fmha_batch_prefill_traits, fmha_batch_prefill_args,
                         const ck_tile::stream_config&) {
  return -1;
}
