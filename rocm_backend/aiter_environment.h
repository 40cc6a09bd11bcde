// What a library of AITER was built for, and where the ASM kernels are that belong to it.
#pragma once

#include <string>

namespace attn_dispatch::aiter_adapter {

// The gfx name; null in a library that was built for several.
const char* ArchOfBuild();

// The folder, with a slash at the end since AITER pastes file names to it; empty where there is
// none.
const std::string& AsmFolder();

}  // namespace attn_dispatch::aiter_adapter
