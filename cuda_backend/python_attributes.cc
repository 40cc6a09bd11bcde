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

// Each `read` returns false, and clears Python's error, if the object has another type.

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
  const bool fits = !(std::fabs(number) > FLT_MAX);  // true for NaN
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
  PyErr_Clear();  // the text has half of a surrogate pair
  return false;
}

const char* type_name(bool*) { return "a bool"; }
const char* type_name(int64_t*) { return "an integer of 64 bits"; }
const char* type_name(float*) { return "a number"; }
const char* type_name(Text*) { return "text"; }

std::string ascii_repr(py::handle object) {
  PyObject* const text = PyObject_ASCII(object.ptr());
  const char* const letters = text ? PyUnicode_AsUTF8(text) : nullptr;
  std::string printable = excerpt(letters ? letters : Py_TYPE(object.ptr())->tp_name);
  PyErr_Clear();  // the object's repr may have raised
  Py_XDECREF(text);
  return printable;
}

}  // namespace

Result<SdpaSpec> spec_of(const py::dict& attributes) {
  SdpaSpec spec;
  py::set known;
  std::string errors;
  const auto add = [&](const std::string& error) {
    errors += (errors.empty() ? "" : "; ") + error;
  };
#define FIELD(type, name)                                                                         \
  known.add(#name);                                                                               \
  if (!attributes.contains(#name)) {                                                              \
    add("missing " #name);                                                                        \
  } else if (const py::object value = attributes[#name]; !read(value, &spec.name)) {              \
    add(#name ": expected " + std::string(type_name(&spec.name)) + ", got " + ascii_repr(value)); \
  }
  ATTN_SDPA_SPEC(FIELD)
#undef FIELD
  for (const auto& [name, value] : attributes) {
    if (!known.contains(name)) add("unknown " + ascii_repr(name));
  }
  if (!errors.empty()) return Status{Code::kWrongCall, errors};
  return validated(std::move(spec));
}

}  // namespace attn_dispatch
