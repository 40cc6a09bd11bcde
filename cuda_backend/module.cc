// attn_dispatch._cuda: what Python needs of this library, and nothing of attention's meaning.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/prctl.h>

#include <chrono>
#include <csignal>

#include "buffers.h"
#include "handlers.h"
#include "library.h"
#include "plan.h"
#include "python_attributes.h"
#include "python_module.h"
#include "spec.h"
#include "status.h"
#include "visit.h"

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

// Releases the interpreter's lock. Its holder's visit ends after it: the process must not end
// before the thread is back in the interpreter.
class Unlocked {
 public:
  explicit Unlocked(Visit& visit) : visit_(visit), state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    visit_.return_to_interpreter();
    PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Visit& visit_;
  PyThreadState* state_;
};

// What `function` returns, which takes no Python object and may take long.
template <typename Function>
auto visiting(Function&& function) {
  Visit visit;
  if (!visit.status().ok()) throw CudnnError(visit.status());
  Unlocked unlocked(visit);
  return function();
}

// The same of something that may fail, asked about a call.
template <typename Function>
auto ask(const py::dict& attributes, Function&& function) {
  const SdpaSpec spec = spec_from(attributes);
  return value_or_throw(visiting([&] { return function(spec); }));
}

// A plan takes a second at most, and where it hangs the user has waited long enough.
constexpr int64_t kLongestEnd = 10'000;  // milliseconds

void before_exit(int64_t milliseconds) {
  py::gil_scoped_release release;
  refuse_visits_and_wait(std::chrono::milliseconds(milliseconds));
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
      py::object error = py::reinterpret_borrow<py::object>(error_type)(to_python(e.what()));
      error.attr("code") = e.code;
      PyErr_SetObject(error_type, error.ptr());
    }
  });

  m.def(
      "has_driver", [] { return visiting([] { return has_driver(); }); },
      "Whether the CUDA driver's own library can be loaded here.");
  m.def(
      "load_cudnn",
      [](const py::object& path, bool allow_stand_ins) {
        const std::string file = path_from(path);
        return value_or_throw(visiting([&] { return load_cudnn(file, allow_stand_ins); }));
      },
      py::arg("path"), py::arg("allow_stand_ins") = false,
      "Load libcudnn.so.9 from a name or path; the first success is final. Returns its version.");
  m.def("cudnn_version", &cudnn_version,
        "Version of the loaded cuDNN, 91900 for 9.19.0; 0 if none.");
  m.def(
      "cudnn_path", [] { return to_python(cudnn_path()); },
      "The file that cuDNN was loaded from; empty if none.");
  m.def("driver_is_stand_in", &driver_is_stand_in,
        "Whether no CUDA driver is here, so that plans can be made but not run.");
  m.def(
      "device_properties",
      [](int32_t ordinal) {
        return value_or_throw(visiting([&] { return device_properties(ordinal); }));
      },
      py::arg("ordinal"), "cuDNN's device properties of a present device, as JSON.");
  m.def(
      "plan",
      [](const py::dict& attributes, const std::string& properties) {
        const auto plan = ask(attributes, [&](auto& spec) { return plan_for(spec, properties); });
        return py::make_tuple(plan->engine, plan->workspace_bytes);
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Plan a call; returns (engine, workspace bytes) or raises CudnnError with cuDNN's reason.");
  m.def(
      "plan_key",
      [](const py::dict& attributes, const std::string& properties) {
        return ask(attributes, [&](auto& spec) { return plan_key(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "All that the plan of a call depends on.");
  m.def(
      "has_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return ask(attributes, [&](auto& spec) { return has_plan(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "Whether this process has planned the call, or refused it.");
  m.def(
      "export_plan",
      [](const py::dict& attributes, const std::string& properties) {
        return ask(attributes, [&](auto& spec) { return export_plan(spec, properties); });
      },
      py::arg("attributes"), py::arg("device_properties"),
      "The plan of a call, as a line of JSON.");
  m.def(
      "import_plan",
      [](const py::dict& attributes, const std::string& properties, const std::string& line) {
        const SdpaSpec spec = spec_from(attributes);
        const Status status = visiting([&] { return import_plan(spec, properties, line); });
        if (!status.ok()) throw CudnnError(status);
      },
      py::arg("attributes"), py::arg("device_properties"), py::arg("line"),
      "Take such a line for the plan of a call; a CudnnError if it is not.");
  m.def(
      "engines",
      [](const py::dict& attributes, const std::string& properties) {
        return ask(attributes, [&](auto& spec) { return engines_for(spec, properties); });
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
      "(operands, results) of a call but for the workspace, each (name, bytes); takes no cuDNN.");
  m.def("plan_cache_stats", [] {
    const CacheStats stats = visiting([] { return plan_cache_stats(); });
    py::dict result;
    result["size"] = stats.size;
    result["capacity"] = stats.capacity;
    result["builds"] = stats.builds;
    result["hits"] = stats.hits;
    return result;
  });
  m.def(
      "take_remade_plans",
      [] { return value_or_throw(visiting([] { return take_remade_plans(); })); },
      "Key -> line of imported plans that did not load and were made anew; each only once.");
  m.def("before_exit", &before_exit, py::arg("milliseconds"),
        "Let no other thread plan any more, and wait this long for those that do.");
  m.def(
      "end_with_parent", [] { return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0; },
      "Have this process ended with the thread that started it, even while it is stopped.");
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

  notice_forks();
  py::module_::import("atexit").attr("register")(m.attr("before_exit"), kLongestEnd);
}
