// What must hold of a call whose buffers fit, before anything is written or launched: what AITER's
// kernels take for granted, and where they would read or write beyond an array, end the process or
// compute something else.
#pragma once

#include "aiter_api.h"
#include "status.h"

namespace attn_dispatch {

Status check(const AttnAiterForward& forward);
Status check(const AttnAiterBackward& backward);
Status check(const AttnAiterSplitKv& split);

}  // namespace attn_dispatch
