// From the buffers of one execution to the structs of aiter_api.h: every size, stride and pointer.
#pragma once

#include "aiter_api.h"
#include "arrays.h"
#include "call_site.h"

namespace attn_dispatch {

// All leave what is wrong in arrays.status().
AttnAiterForward fill_forward(const CallSite& site, Arrays& arrays);

AttnAiterSplitKv fill_split_kv(const CallSite& site, Arrays& arrays);

struct BackwardCall {
  AttnAiterBackward call{};
  size_t dq_bytes = 0;
  size_t dq_acc_bytes = 0;
  size_t dbias_bytes = 0;
};
BackwardCall fill_backward(const CallSite& site, Arrays& arrays);

}  // namespace attn_dispatch
