// The handlers of cuda_backend/fa4 as a Python module of their own, for XLA's CPU platform, and
// what else tests call of the code below them.
#include <dlfcn.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "fa4/calls.h"
#include "fa4/module_functions.h"
#include "fa4/tangent.h"
#include "fa4/wide.h"
#include "handlers.h"
#include "library.h"
#include "python_module.h"
#include "xla/ffi/api/c_api.h"

namespace py = pybind11;

// The linker passes calls of dlopen here. The fake driver does not have the real one's name, as
// that would make it the driver of everything else in the process.
extern "C" {
void* __real_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags) {
  const bool is_driver = name && std::strcmp(name, "libcuda.so.1") == 0;
  return __real_dlopen(is_driver ? "libattn_fake_driver.so" : name, flags);
}
}

namespace attn_dispatch {
namespace {

// An array as a test describes it: address, dtype, shape, bytes.
using Described = std::tuple<uint64_t, std::string, std::vector<int64_t>, int64_t>;

std::vector<Array> arrays_of(const std::vector<Described>& described) {
  std::vector<Array> arrays;
  for (const auto& [address, dtype, shape, bytes] : described) {
    Array array{reinterpret_cast<void*>(address), ElementType::kOther,
                Shape(shape.data(), shape.data() + shape.size()), bytes};
    for (const ElementType type :
         {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32, ElementType::kInt32,
          ElementType::kUInt32}) {
      if (dtype == type_name(type)) array.type = type;
    }
    arrays.push_back(array);
  }
  return arrays;
}

// Runs a pass with arrays as the test describes them. Returns the kind of failure, and its message.
std::pair<std::string, std::string> run(const std::string& name, bool has_bits, bool has_sinks,
                                        bool is_backward, const std::vector<Described>& operands,
                                        const std::vector<Described>& results) {
  CompiledSet* set = compiled_library()->find(name);
  const CallKind kind = {has_bits ? MaskForm::kBits : MaskForm::kRows, has_sinks};
  Status status = load_pass(*set, kind, is_backward ? Pass::kBackward : Pass::kForward, 0);
  const auto pass = is_backward ? run_backward : run_forward;
  if (status.ok()) {
    status =
        pass(*set, kind, 1, arrays_of(operands), arrays_of(results), /*poisons=*/false, nullptr);
  }
  return {code_name(status.code), status.message};
}

// The same of a tangent.
std::pair<std::string, std::string> tangent(const std::string& name, bool has_bits,
                                            const std::vector<Described>& operands,
                                            const std::vector<Described>& results) {
  CompiledSet* set = compiled_library()->find(name);
  const CallKind kind = {has_bits ? MaskForm::kBits : MaskForm::kRows};
  Status status = load_pass(*set, kind, Pass::kTangent, 0);
  if (status.ok()) {
    status = run_tangent(*set, kind, 1, arrays_of(operands), arrays_of(results),
                         /*poisons=*/false, nullptr);
  }
  return {code_name(status.code), status.message};
}

// The same of a pass of wide heads.
std::pair<std::string, std::string> wide(const std::string& name, bool is_causal, int64_t keys,
                                         bool is_backward, const std::vector<Described>& operands,
                                         const std::vector<Described>& results) {
  CompiledSet* set = compiled_library()->find(name);
  CallKind kind;
  kind.is_causal = is_causal;
  kind.keys = keys;
  const Pass pass = is_backward ? Pass::kWideBackward : Pass::kWideForward;
  Status status = load_pass(*set, kind, pass, 0);
  const auto run = is_backward ? run_wide_backward : run_wide_forward;
  if (status.ok()) {
    status =
        run(*set, kind, 1, arrays_of(operands), arrays_of(results), /*poisons=*/false, nullptr);
  }
  return {code_name(status.code), status.message};
}

// The traits that an execute handler declares (XLA_FFI_Handler_TraitsBits).
uint32_t traits_of(const py::capsule& handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  reinterpret_cast<XLA_FFI_Handler*>(handler.get_pointer())(&frame);
  return metadata.traits;
}

}  // namespace
}  // namespace attn_dispatch

PYBIND11_MODULE(_fa4_emulated, m) {
  attn_dispatch::add_fa4_functions(m);
  m.def("run", &attn_dispatch::run);
  m.def("tangent", &attn_dispatch::tangent);
  m.def("wide", &attn_dispatch::wide);
  m.def("has_driver", &attn_dispatch::has_driver);
  m.def("clear_rows_handlers",
        [] { return attn_dispatch::capsules(attn_dispatch::clear_rows_handlers()); });
  m.def("clear_ends_handlers",
        [] { return attn_dispatch::capsules(attn_dispatch::clear_ends_handlers()); });
  m.def("traits", &attn_dispatch::traits_of);
  m.attr("COMMAND_BUFFERS") = uint32_t{XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE};
}
