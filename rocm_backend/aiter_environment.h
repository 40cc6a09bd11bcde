// Where the ASM kernels are that belong to a library of AITER.
#pragma once

#include <string>

namespace attn_dispatch::aiter_adapter {

// The folder, with a slash at the end since AITER pastes file names to it; empty where there is
// none.
const std::string& AsmFolder();

}  // namespace attn_dispatch::aiter_adapter
