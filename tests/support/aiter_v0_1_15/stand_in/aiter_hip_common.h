// Stands for AITER's header of this name: what the adapter uses of it.
#pragma once

#include <hip/hip_runtime_api.h>

#include "ck_tile_shim.h"

namespace aiter_detail {

inline thread_local bool g_aiter_can_throw = false;

}  // namespace aiter_detail
