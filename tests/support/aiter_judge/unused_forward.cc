// What AITER's forward library holds besides, and nothing here calls.
#include "mha_fwd.h"

float fmha_batch_prefill(fmha_batch_prefill_traits, fmha_batch_prefill_args,
                         const ck_tile::stream_config&) {
  return -1;
}
