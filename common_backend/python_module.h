// What both Python modules need: text that may hold file names, and capsules of handlers.
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

inline std::map<std::string, pybind11::capsule> capsules(
    const std::map<std::string, void*>& addresses) {
  std::map<std::string, pybind11::capsule> result;
  for (const auto& [name, address] : addresses) result.emplace(name, pybind11::capsule(address));
  return result;
}

}  // namespace attn_dispatch
