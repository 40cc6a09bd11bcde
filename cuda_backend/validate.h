// Whether the attributes of a call are in order, asked before anything is planned or launched: a
// module may have been lowered by another version of this library, or be written by hand.
#pragma once

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// Every wrong value that is one by itself; or else the first that contradicts others, the nodes or
// arrays of a score program, and sizes that cannot be. Each is a sentence with the attribute's
// name, what was expected and what it is. Both ways in end here: spec_of of attributes.h and of
// python_attributes.h.
Result<SdpaSpec> validated(SdpaSpec spec);

}  // namespace attn_dispatch
