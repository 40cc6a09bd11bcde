// The attributes of a call as a dictionary of Python's, which a probe passes.
#pragma once

#include <pybind11/pybind11.h>

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// Refuses whatever is missing, unknown or of another type, all of it by name, and what validate.h
// refuses. With the GIL.
Result<SdpaSpec> spec_of(const pybind11::dict& attributes);

}  // namespace attn_dispatch
