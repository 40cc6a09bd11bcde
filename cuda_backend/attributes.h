// The spec of a custom call, from its attributes.
#pragma once

#include "spec.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace attn_dispatch {

// Refuses whatever is missing, unknown or of another type, all of it by name, and what validate.h
// refuses.
Result<SdpaSpec> spec_of(const xla::ffi::Dictionary& attributes);

}  // namespace attn_dispatch
