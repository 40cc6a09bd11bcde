// The architecture that a library of AITER's was built for, and the folder of its ASM kernels.
#pragma once

#include <string>

namespace attn_dispatch::aiter_adapter {

// The gfx name, for example "gfx942"; null in a library that was built for several.
const char* ArchOfBuild();

// The folder, with a slash at the end because AITER appends file names to it; empty if it was not
// found.
const std::string& AsmFolder();

}  // namespace attn_dispatch::aiter_adapter
