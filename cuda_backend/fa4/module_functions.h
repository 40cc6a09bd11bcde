// Compiled FlashAttention-4 in Python's module _cuda, and in the one with which tests run it.
#pragma once

#include <pybind11/pybind11.h>

namespace attn_dispatch {

// Adds load_fa4, fa4_handlers and fa4_state_type.
void add_fa4_functions(pybind11::module_& m);

}  // namespace attn_dispatch
