// Finds library files that would hang or crash the loader: pipes, and files that were cut off, for
// example by a full disk or a broken download.
#pragma once

#include <string>

#include "status.h"

namespace attn_dispatch {

// An error if `path` is not a regular file (opening a pipe waits for a writer), or an ELF file that
// ends before the last segment that the loader maps (touching it raises SIGBUS). No error for what
// the loader refuses itself: a file that is no library, or does not exist.
Status check_library_file(const std::string& path);

}  // namespace attn_dispatch
