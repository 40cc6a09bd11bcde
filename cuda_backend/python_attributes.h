// The spec of a call, read from a Python dictionary of its attributes.
#pragma once

#include <pybind11/pybind11.h>

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// Refuses by name every attribute that is missing, unknown or of another type, and then what
// validate.h refuses. The caller holds the interpreter's lock.
Result<SdpaSpec> spec_of(const pybind11::dict& attributes);

}  // namespace attn_dispatch
