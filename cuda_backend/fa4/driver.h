// The CUDA driver as compiled kernels call it (fa4_library.h).
#pragma once

#include <cstdint>
#include <string>

#include "fa4_library.h"

namespace attn_dispatch {

// The functions that a kernel library calls. They fail where there is no driver.
AttnFa4Driver fa4_driver();

// Forgets this thread's failure. Kernels' host functions lose the first failure where a later call
// into the driver fails as well.
void forget_driver_failure();

// This thread's first failure since then, as a CUresult; 0 if none.
int32_t driver_failure();

// The driver's name of a CUresult: "CUDA_ERROR_OUT_OF_MEMORY".
std::string driver_error_name(int32_t result);

}  // namespace attn_dispatch
