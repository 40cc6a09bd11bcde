// What both Python modules need: their entry, text that may hold file names, and capsules of
// handlers.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <string>

#include "status.h"

namespace attn_dispatch {

// Python's str of a text. It may hold a file name, which need not be UTF-8.
inline pybind11::str to_python(const std::string& text) {
  return pybind11::reinterpret_steal<pybind11::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

// The bytes of a path-like object, as the operating system takes them.
inline std::string path_from(const pybind11::object& path) {
  PyObject* bytes = nullptr;
  if (!PyUnicode_FSConverter(path.ptr(), &bytes)) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::bytes>(bytes);
}

// Raises a RuntimeError with the sentence of a failure.
inline void raise_if_error(const Status& status) {
  if (status.ok()) return;
  PyErr_SetObject(PyExc_RuntimeError, to_python(status.message).ptr());
  throw pybind11::error_already_set();
}

// JAX and the vendors' libraries belong to the process, not to one of its interpreters.
inline bool is_main_interpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

inline constexpr char kMainInterpreterAlone[] =
    "expected to be imported by the main interpreter, got a subinterpreter; use a thread, or a "
    "process of its own";

inline std::map<std::string, pybind11::capsule> capsules(
    const std::map<std::string, void*>& addresses) {
  std::map<std::string, pybind11::capsule> result;
  for (const auto& [name, address] : addresses) result.emplace(name, pybind11::capsule(address));
  return result;
}

}  // namespace attn_dispatch

// PYBIND11_MODULE, which the main interpreter alone can import. Up to CPython 3.12 a subinterpreter
// calls the entry, and pybind11 would wait there for ever for the lock that the caller holds. Later
// ones call the entry in the main interpreter, and the rest in the subinterpreter.
#define ATTN_PYTHON_MODULE(name, variable) ATTN_NAMED_PYTHON_MODULE(name, variable)
#define ATTN_NAMED_PYTHON_MODULE(name, variable)                                \
  static void name##_functions(pybind11::module_& variable);                    \
  PYBIND11_PLUGIN_DECL(name##_in_main)                                          \
  PYBIND11_PLUGIN_IMPL(name) {                                                  \
    if (attn_dispatch::is_main_interpreter()) return PyInit_##name##_in_main(); \
    PyErr_SetString(PyExc_ImportError, attn_dispatch::kMainInterpreterAlone);   \
    return nullptr;                                                             \
  }                                                                             \
  PYBIND11_MODULE(name##_in_main, module) {                                     \
    if (!attn_dispatch::is_main_interpreter()) {                                \
      throw pybind11::import_error(attn_dispatch::kMainInterpreterAlone);       \
    }                                                                           \
    name##_functions(module);                                                   \
  }                                                                             \
  void name##_functions(pybind11::module_& variable)
