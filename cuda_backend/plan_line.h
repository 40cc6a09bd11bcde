// A plan as a line of text, in which it is stored and passed to other processes: JSON of its key,
// engine, workspace in bytes and checksum, a space, and what cuDNN serialized in hexadecimal
// digits.
#pragma once

#include <string>

#include "plan.h"
#include "status.h"

namespace attn_dispatch {

std::string format_plan(const Plan& plan);

// The plan in such a line, without its spec. A line that is something else, too long, or damaged is
// a wrong call.
Result<Plan> parse_plan(const std::string& line);

}  // namespace attn_dispatch
