// Makes the structs of aiter_api.h from the buffers of one execution: sizes, strides and pointers.
#pragma once

#include "aiter_api.h"
#include "array_reader.h"
#include "call_site.h"

namespace attn_dispatch {

// A mismatch is in `arrays.status()` afterwards, and the struct must not be used then.
AttnAiterForward forward_struct(const CallSite& site, ArrayReader& arrays);

AttnAiterSplitKv split_kv_struct(const CallSite& site, ArrayReader& arrays);

// With the sizes of what must be zeroed before the call.
struct BackwardCall {
  AttnAiterBackward call{};
  size_t dq_bytes = 0;
  size_t dbias_bytes = 0;
};
BackwardCall backward_struct(const CallSite& site, ArrayReader& arrays);

}  // namespace attn_dispatch
