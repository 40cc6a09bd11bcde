// The architecture that a library of AITER's was built for, and the folder of its ASM kernels.
#pragma once

#include <string>

namespace attn_dispatch::aiter_adapter {

// The gfx name, for example "gfx942"; null in a library that was built for several.
const char* ArchOfBuild();

// The folder, with a slash at the end because AITER appends file names to it; empty if it was not
// found.
const std::string& AsmFolder();

// The answer to AITER's question for its variable AITER_ASM_DIR; empty if the folder was not found.
// Generation "dev18" expects the folder above, and later ones the one that has a folder for each
// architecture.
const std::string& AsmVariable();

}  // namespace attn_dispatch::aiter_adapter
