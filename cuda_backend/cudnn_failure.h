// Reads cuDNN's error messages: whether cuDNN refuses the call, or failed for another reason.
#pragma once

#include <string>

#include "status.h"

namespace attn_dispatch {

// The status of a step that failed with cuDNN's message. The code is `refusal` if the call is at
// fault. If the message names a status of the machine (no memory, an internal error, a driver or a
// library that fails), it is kLibrary, or kDevice if `refusal` is kDevice.
Status cudnn_failure(const std::string& step, const std::string& message, Code refusal);

}  // namespace attn_dispatch
