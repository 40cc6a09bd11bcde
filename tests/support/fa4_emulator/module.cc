// The handlers of cuda_backend/fa4 as a Python module of their own, for XLA's CPU platform.
#include "fa4/module_functions.h"

PYBIND11_MODULE(_fa4_emulated, m) { attn_dispatch::add_fa4_functions(m); }
