// Checks the attributes of a call before anything is planned or launched: a module may have been
// lowered by another version of this library, or written by hand.
#pragma once

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// The spec, or what is wrong with it: every value that is out of range; otherwise the first that
// contradicts another, the first error in a score program or its arrays, or the first size that is
// too large. Each sentence has the attribute's name, what was expected and what it is. Both
// functions named spec_of end here (ffi_attributes.h, python_attributes.h).
Result<SdpaSpec> validated(SdpaSpec spec);

}  // namespace attn_dispatch
