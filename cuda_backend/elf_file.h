// Library files that were cut off, as by a full disk or a download that broke.

#pragma once

#include <string>

#include "status.h"

namespace attn_dispatch {

// An error for a library that ends before what the loader would map of it: to touch that is a
// SIGBUS. Fine for whatever the loader itself refuses, such as a file that is no library.
Status check_is_whole(const std::string& path);

}  // namespace attn_dispatch
