// The spec of a custom call, read from its attributes.
#pragma once

#include "spec.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Refuses by name every attribute that is missing, unknown or of another type, and then what
// validate.h refuses.
Result<SdpaSpec> spec_of(const xla::ffi::Dictionary& attributes);

}  // namespace attn_dispatch
