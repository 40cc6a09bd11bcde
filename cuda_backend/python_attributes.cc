#include "python_attributes.h"

#include <cfloat>
#include <cmath>
#include <string>
#include <utility>

#include "validate.h"
#include "wrong_value.h"

namespace py = pybind11;

namespace attn_dispatch {
namespace {

// Each is false where the object is none of its type; Python's error is cleared then.

bool read(py::handle object, bool* value) {
  *value = object.ptr() == Py_True;
  return PyBool_Check(object.ptr());
}

bool read(py::handle object, int64_t* value) {
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) return false;
  PyObject* number = PyNumber_Index(object.ptr());
  if (number) {
    *value = PyLong_AsLongLong(number);
    Py_DECREF(number);
  }
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

bool read(py::handle object, float* value) {
  if (PyBool_Check(object.ptr())) return false;
  const double number = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  const bool fits = !(std::fabs(number) > FLT_MAX);  // nor is NaN beyond it
  *value = fits ? static_cast<float>(number) : std::copysign(HUGE_VALF, number > 0 ? 1.0f : -1.0f);
  return true;
}

bool read(py::handle object, Text* value) {
  if (!PyUnicode_Check(object.ptr())) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text) {
    *value = Text(std::string_view(text, static_cast<size_t>(size)));
    return true;
  }
  PyErr_Clear();  // half of a surrogate pair
  return false;
}

const char* expected(bool*) { return "a bool"; }
const char* expected(int64_t*) { return "an integer of 64 bits"; }
const char* expected(float*) { return "a number"; }
const char* expected(Text*) { return "text"; }

std::string shown(py::handle object) {
  PyObject* const text = PyObject_ASCII(object.ptr());
  const char* const letters = text ? PyUnicode_AsUTF8(text) : nullptr;
  std::string shown = beginning(letters ? letters : Py_TYPE(object.ptr())->tp_name);
  PyErr_Clear();  // an error of the object's own repr
  Py_XDECREF(text);
  return shown;
}

}  // namespace

Result<SdpaSpec> spec_of(const py::dict& attributes) {
  SdpaSpec spec;
  py::set known;
  std::string wrong;
  const auto add = [&](const std::string& what) { wrong += (wrong.empty() ? "" : "; ") + what; };
#define FIELD(type, name)                                                                   \
  known.add(#name);                                                                         \
  if (!attributes.contains(#name)) {                                                        \
    add("missing " #name);                                                                  \
  } else if (const py::object value = attributes[#name]; !read(value, &spec.name)) {        \
    add(#name ": expected " + std::string(expected(&spec.name)) + ", got " + shown(value)); \
  }
  ATTN_SDPA_SPEC(FIELD)
#undef FIELD
  for (const auto& [name, value] : attributes) {
    if (!known.contains(name)) {
      add("unknown " + shown(name));
    }
  }
  if (!wrong.empty()) return Status{Code::kWrongCall, wrong};
  return validated(std::move(spec));
}

}  // namespace attn_dispatch
