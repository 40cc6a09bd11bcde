// A plan as a line of text, which other processes read: JSON of its key, engine and checksum, then
// what cuDNN serialized, in hexadecimal digits.
#pragma once

#include <string>

#include "plan.h"
#include "status.h"

namespace attn_dispatch {

std::string line_of(const Plan& plan);

// The plan in such a line, with key, engine and blob alone. A wrong call where the line is
// another's text, is too long, or has been damaged.
Result<Plan> read_line(const std::string& line);

}  // namespace attn_dispatch
