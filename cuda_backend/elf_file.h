// Library files that the loader must not be given: pipes, and files that were cut off, as by a full
// disk or a download that broke.

#pragma once

#include <string>

#include "status.h"

namespace attn_dispatch {

// An error for what is not a file, as the loader would wait for somebody to write to a pipe, and
// for a library that ends before what the loader would map of it: to touch that is a SIGBUS. Fine
// for whatever the loader itself refuses, such as a file that is no library, or is not there.
Status check_is_whole(const std::string& path);

}  // namespace attn_dispatch
