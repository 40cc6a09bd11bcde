// The Python module attn_dispatch._cuda: it loads cuDNN, plans, and hands out the FFI handlers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/prctl.h>

#include <chrono>
#include <csignal>

#include "buffers.h"
#include "cudnn_scope.h"
#include "fa4/module_functions.h"
#include "handlers.h"
#include "library.h"
#include "plan.h"
#include "python_attributes.h"
#include "python_module.h"
#include "spec.h"
#include "status.h"

namespace py = pybind11;
using namespace attn_dispatch;

namespace {

// A failure as Python gets it: a sentence, with the name of its code.
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

// Releases the interpreter's lock. The thread's CudnnScope must end after this: the process must
// not end before the thread is back in the interpreter.
class GilReleased {
 public:
  explicit GilReleased(CudnnScope& scope) : scope_(scope), state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    scope_.return_to_interpreter();
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  CudnnScope& scope_;
  PyThreadState* state_;
};

// Calls `function` inside cuDNN and without the interpreter's lock. It must not touch Python
// objects.
template <typename Function>
auto in_cudnn(Function&& function) {
  CudnnScope scope;
  if (!scope.status().ok()) throw CudnnError(scope.status());
  GilReleased released(scope);
  return function();
}

// Calls a function of a call's spec inside cuDNN, and throws its failure.
template <typename Function>
auto in_cudnn_with_spec(const py::dict& attributes, Function&& function) {
  const SdpaSpec spec = spec_from(attributes);
  return value_or_throw(in_cudnn([&] { return function(spec); }));
}

// Planning takes a second at most; if it hangs, the process ends all the same.
constexpr int64_t kLongestWaitAtExit = 10'000;  // milliseconds

void before_exit(int64_t milliseconds) {
  py::gil_scoped_release release;
  close_cudnn_and_wait(std::chrono::milliseconds(milliseconds));
}

}  // namespace

ATTN_PYTHON_MODULE(_cuda, m) {
  m.doc() = "cuDNN fused attention: planning, and the XLA FFI handlers that run the plans.";

  static PyObject* error_type =
      py::exception<CudnnError>(m, "CudnnError", PyExc_RuntimeError).release().ptr();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const CudnnError& e) {
      py::object error = py::reinterpret_borrow<py::object>(error_type)(to_python(e.what()));
      error.attr("code") = e.code;
      PyErr_SetObject(error_type, error.ptr());
    }
  });

  m.def(
      "has_driver", [] { return in_cudnn([] { return has_driver(); }); },
      "Whether the CUDA driver's own library can be loaded here.");
  m.def(
      "cudnn_file",
      [](const py::object& name) {
        const std::string given = path_from(name);
        return to_python(in_cudnn([&] { return cudnn_file(given); }));
      },
      py::arg("name"), "The file that load_cudnn would open; empty if the loader finds none.");
  m.def(
      "load_cudnn",
      [](const py::object& path, bool allow_stand_ins) {
        const std::string file = path_from(path);
        return value_or_throw(in_cudnn([&] { return load_cudnn(file, allow_stand_ins); }));
      },
      py::arg("path"), py::arg("allow_stand_ins") = false,
      "Load libcudnn.so.9 from a name or path; the first success is final. Returns its version.");
  m.def("cudnn_version", &cudnn_version,
        "Version of the loaded cuDNN, 91900 for 9.19.0; 0 if none.");
  m.def(
      "cudnn_path", [] { return to_python(cudnn_path()); },
      "The file that cuDNN was loaded from; empty if none.");
  m.def("driver_is_stand_in", &driver_is_stand_in,
        "Whether the driver is the stand-in, so that plans can be made but not run.");
  m.def(
      "device_properties",
      [](int32_t ordinal) {
        return value_or_throw(in_cudnn([&] { return device_properties(ordinal); }));
      },
      py::arg("ordinal"), "cuDNN's device properties of a present device, as JSON.");
  m.def(
      "plan",
      [](const py::dict& attributes, const std::string& properties) {
        const auto plan =
            in_cudnn_with_spec(attributes, [&](auto& spec) { return plan_for(spec, properties); });
        return py::make_tuple(plan->engine, plan->workspace_bytes);
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Plan a call; returns (engine, workspace bytes) or raises CudnnError with cuDNN's reason.");
  m.def(
      "plan_key",
      [](const py::dict& attributes, const std::string& properties) {
        return in_cudnn_with_spec(attributes,
                                  [&](auto& spec) { return plan_key(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Everything that the plan of a call depends on.");
  m.def(
      "has_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return in_cudnn_with_spec(attributes,
                                  [&](auto& spec) { return has_plan(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Whether this process has planned the call, or refused it.");
  m.def(
      "export_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return in_cudnn_with_spec(attributes,
                                  [&](auto& spec) { return export_plan(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "The plan of a call, as a line of JSON.");
  m.def(
      "import_plan",
      [](const py::dict& attributes, const std::string& properties, const std::string& line) {
        const SdpaSpec spec = spec_from(attributes);
        const Status status = in_cudnn([&] { return import_plan(spec, properties, line); });
        if (!status.ok()) throw CudnnError(status);
      },
      py::arg("attributes"), py::arg("device_properties"), py::arg("line"),
      "Put the plan in such a line into the cache; a CudnnError if it is not the plan of the "
      "call.");
  m.def(
      "engines",
      [](const py::dict& attributes, const std::string& properties) {
        return in_cudnn_with_spec(attributes,
                                  [&](auto& spec) { return engines_for(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "The engines that cuDNN proposes for a call and the values of their knobs, as JSON.");
  m.def(
      "buffers",
      [](const py::dict& attributes) {
        const CallBuffers buffers = value_or_throw(buffers_of(spec_from(attributes)));
        std::vector<std::pair<std::string, int64_t>> operands, results;
        for (size_t i = 0; i < buffers.all.size(); ++i) {
          const auto& [name, bytes] = buffers.all[i];
          (i < buffers.operands ? operands : results).emplace_back(name, bytes);
        }
        return std::pair(operands, results);
      },
      py::arg("attributes"),
      "(operands, results) of a call except the workspace, each (name, bytes); needs no cuDNN.");
  m.def("plan_cache_stats", [] {
    const CacheStats stats = in_cudnn([] { return plan_cache_stats(); });
    py::dict result;
    result["size"] = stats.size;
    result["capacity"] = stats.capacity;
    result["builds"] = stats.builds;
    result["hits"] = stats.hits;
    return result;
  });
  m.def(
      "take_remade_plans",
      [] { return value_or_throw(in_cudnn([] { return take_remade_plans(); })); },
      "Key -> line of imported plans that did not load and were rebuilt since the last call.");
  m.def("before_exit", &before_exit, py::arg("milliseconds"),
        "Let no other thread into cuDNN any more, and wait this long for those inside.");
  m.def(
      "end_with_parent", [] { return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0; },
      "Let the system kill this process when the thread that started it ends.");
  m.def(
      "ffi_handlers", [] { return capsules(ffi_handlers()); },
      "Stage name -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "clear_rows_handlers", [] { return capsules(clear_rows_handlers()); },
      "The same for attn_dispatch_clear_rows.");
  m.def(
      "clear_ends_handlers", [] { return capsules(clear_ends_handlers()); },
      "The same for attn_dispatch_clear_ends.");
  m.def(
      "ffi_state_type", [] { return capsules(ffi_state_type()); },
      "type_id and type_info capsules, for jax.ffi.register_ffi_type.");
  add_fa4_functions(m);
  m.def("set_local_devices", &set_local_devices, py::arg("ordinals"),
        "Set the driver's ordinals of the devices that JAX uses in this process.");

  watch_forks();
  Py_AtExit(before_destructors);
  py::module_::import("atexit").attr("register")(m.attr("before_exit"), kLongestWaitAtExit);
}
