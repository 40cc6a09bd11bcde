// The answers of aiter_asm_folder.cc, for one library that serves all GPUs.
#include "aiter_environment.h"
#include "fake_hip.h"

namespace attn_dispatch::aiter_adapter {

const char* ArchOfBuild() { return nullptr; }
const std::string& AsmFolder() { return fake_hip::FolderOfDevice(); }
const std::string& AsmVariable() { return fake_hip::FolderOfDevice(); }

}  // namespace attn_dispatch::aiter_adapter
