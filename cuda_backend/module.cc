// attn_dispatch._cuda: what Python needs of this library, and nothing of attention's meaning.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "buffers.h"
#include "handlers.h"
#include "library.h"
#include "plan.h"
#include "python_attributes.h"
#include "spec.h"
#include "status.h"

namespace py = pybind11;
using namespace attn_dispatch;

namespace {

// Python sees a failure as (code name, sentence) in a CudnnError.
struct CudnnError : std::runtime_error {
  explicit CudnnError(const Status& status)
      : std::runtime_error(status.message), code(code_name(status.code)) {}
  const char* code;
};

template <typename T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw CudnnError(result.status);
  return std::move(result.value);
}

SdpaSpec spec_from(const py::dict& attributes) { return value_or_throw(spec_of(attributes)); }

std::map<std::string, py::capsule> capsules(const std::map<std::string, void*>& addresses) {
  std::map<std::string, py::capsule> result;
  for (const auto& [name, address] : addresses) result.emplace(name, py::capsule(address));
  return result;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "cuDNN fused attention: planning, and the XLA FFI handlers that run the plans.";

  static PyObject* error_type =
      py::exception<CudnnError>(m, "CudnnError", PyExc_RuntimeError).release().ptr();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const CudnnError& e) {
      py::object error = py::reinterpret_borrow<py::object>(error_type)(e.what());
      error.attr("code") = e.code;
      PyErr_SetObject(error_type, error.ptr());
    }
  });

  m.def("has_driver", &has_driver, "Whether the CUDA driver's own library can be loaded here.");
  m.def(
      "load_cudnn",
      [](const std::string& path, bool allow_stand_ins) {
        return value_or_throw(load_cudnn(path, allow_stand_ins));
      },
      py::arg("path"), py::arg("allow_stand_ins") = false, py::call_guard<py::gil_scoped_release>(),
      "Load libcudnn.so.9 from a name or path; the first success is final. Returns its version.");
  m.def("cudnn_version", &cudnn_version,
        "Version of the loaded cuDNN, 91900 for 9.19.0; 0 if none.");
  m.def("cudnn_path", &cudnn_path, "The file that cuDNN was loaded from; empty if none.");
  m.def("driver_is_stand_in", &driver_is_stand_in,
        "Whether no CUDA driver is here, so that plans can be made but not run.");
  m.def(
      "device_properties",
      [](int32_t ordinal) { return value_or_throw(device_properties(ordinal)); },
      py::arg("ordinal"), py::call_guard<py::gil_scoped_release>(),
      "cuDNN's device properties of a present device, as JSON.");
  m.def(
      "plan",
      [](const py::dict& attributes, const std::string& properties) {
        const SdpaSpec spec = spec_from(attributes);
        Result<std::shared_ptr<const Plan>> plan;
        {
          py::gil_scoped_release release;
          plan = plan_for(spec, properties);
        }
        const auto& value = value_or_throw(std::move(plan));
        return py::make_tuple(value->engine, value->workspace_bytes);
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Plan a call; returns (engine, workspace bytes) or raises CudnnError with cuDNN's reason.");
  m.def(
      "plan_key",
      [](const py::dict& attributes, const std::string& properties) {
        return value_or_throw(plan_key(spec_from(attributes), properties));
      },
      py::arg("attributes"), py::arg("device_properties"),
      "All that the plan of a call depends on.");
  m.def(
      "has_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return value_or_throw(has_plan(spec_from(attributes), properties));
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Whether this process has planned the call, or refused it.");
  m.def(
      "export_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return value_or_throw(export_plan(spec_from(attributes), properties));
      },
      py::arg("attributes"), py::arg("device_properties"),
      "The plan of a call, as a line of JSON.");
  m.def(
      "import_plan",
      [](const py::dict& attributes, const std::string& properties, const std::string& line) {
        if (Status status = import_plan(spec_from(attributes), properties, line); !status.ok()) {
          throw CudnnError(status);
        }
      },
      py::arg("attributes"), py::arg("device_properties"), py::arg("line"),
      "Take such a line for the plan of a call; a CudnnError if it is not.");
  m.def(
      "engines",
      [](const py::dict& attributes, const std::string& properties) {
        const SdpaSpec spec = spec_from(attributes);
        py::gil_scoped_release release;
        Result<std::string> engines = engines_for(spec, properties);
        py::gil_scoped_acquire acquire;
        return value_or_throw(std::move(engines));
      },
      py::arg("attributes"), py::arg("device_properties"),
      "The engines that cuDNN proposes for a call and the values of their knobs, as JSON.");
  m.def(
      "buffers",
      [](const py::dict& attributes) {
        const CallBuffers buffers = value_or_throw(buffers_of(spec_from(attributes)));
        py::list operands, results;
        for (size_t i = 0; i < buffers.all.size(); ++i) {
          const auto& [name, bytes] = buffers.all[i];
          (i < buffers.operands ? operands : results).append(py::make_tuple(name, bytes));
        }
        return py::make_tuple(operands, results);
      },
      py::arg("attributes"),
      "(operands, results) of a call but for the workspace, each (name, bytes); takes no cuDNN.");
  m.def("plan_cache_stats", [] {
    const CacheStats stats = plan_cache_stats();
    py::dict result;
    result["size"] = stats.size;
    result["capacity"] = stats.capacity;
    result["builds"] = stats.builds;
    result["hits"] = stats.hits;
    return result;
  });
  m.def(
      "ffi_handlers", [] { return capsules(ffi_handlers()); },
      "Stage name -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "clear_rows_handlers", [] { return capsules(clear_rows_handlers()); },
      "The same of attn_dispatch_clear_rows.");
  m.def(
      "ffi_state_type", [] { return capsules(ffi_state_type()); },
      "type_id and type_info capsules, for jax.ffi.register_ffi_type.");
  m.def("set_local_devices", &set_local_devices, py::arg("ordinals"),
        "The driver's numbers of the devices that JAX uses here.");
}
