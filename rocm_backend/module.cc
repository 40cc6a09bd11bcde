// The Python module attn_dispatch._rocm: it loads AITER's library and hands out the FFI handlers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "handlers.h"
#include "library.h"
#include "python_module.h"

namespace py = pybind11;
using namespace attn_dispatch;

#ifndef ATTN_DISPATCH_MODULE
#define ATTN_DISPATCH_MODULE _rocm
#endif

ATTN_PYTHON_MODULE(ATTN_DISPATCH_MODULE, m) {
  m.doc() = "AITER's fused attention: the XLA FFI handlers that call it.";
  m.def(
      "load_aiter",
      [](const py::object& path, const std::string& arch) {
        raise_if_error(load_aiter(path_from(path), arch));
      },
      // The interpreter's lock is held: a daemon thread that takes it again while the process ends
      // is unwound through C++, which aborts.
      py::arg("path"), py::arg("arch"),
      "Load the library that serves aiter_api.h on an architecture, or raise a RuntimeError that "
      "says why it cannot be used.");
  m.def("forward_handlers", [] { return capsules(forward_handlers()); });
  m.def("backward_handlers", [] { return capsules(backward_handlers()); });
  m.def("split_kv_handlers", [] { return capsules(split_kv_handlers()); });
  m.def("state_type", [] { return capsules(state_type()); });
}
