// Reading what cuDNN says when it fails: whether it refuses the call, or failed at it this once.
#pragma once

#include <string>

#include "status.h"

namespace attn_dispatch {

// The status of a step that failed. `refusal` is its code where the call is at fault; where cuDNN's
// text has a status of the machine's (no memory, an internal error, a driver or a library that
// fails) it is kLibrary, or kDevice if `refusal` says that a device was needed.
Status cudnn_failure(const std::string& step, const std::string& message, Code refusal);

// What a long text of cuDNN's says of the machine; empty if nothing.
std::string machine_failure(const std::string& message);

}  // namespace attn_dispatch
