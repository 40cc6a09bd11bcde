// What AITER's kernels assume of a call without checking it. Otherwise they would read or write
// outside of an array, end the process, or compute something else. Checked once the buffers fit,
// and before anything is written or launched.
#pragma once

#include "aiter_api.h"
#include "status.h"

namespace attn_dispatch {

Status check_limits(const AttnAiterForward& forward);
Status check_limits(const AttnAiterBackward& backward);
Status check_limits(const AttnAiterSplitKv& split);

}  // namespace attn_dispatch
