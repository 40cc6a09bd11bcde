// The attributes of a custom call, by name. A module lowered by another version of this library, or
// by hand, may lack some, have others, or mean something else by them.
#pragma once

#include "spec.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Refuses whatever is missing, unknown or of another type, all of it by name, and what validate.h
// refuses.
Result<SdpaSpec> spec_of(const xla::ffi::Dictionary& attributes);

}  // namespace attn_dispatch
