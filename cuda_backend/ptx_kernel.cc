#include "ptx_kernel.h"

#include <string>

namespace attn_dispatch {
namespace {

using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;

Status failed(const char* call, int status) {
  return {Code::kDevice, std::string(call) + " failed with status " + std::to_string(status)};
}

}  // namespace

Status PtxKernel::load(int32_t device_ordinal) {
  ATTN_RETURN_IF_ERROR(check_ordinal(device_ordinal));
  if (loaded_[device_ordinal].load(std::memory_order_acquire)) return {};
  static auto* load = driver_symbol<int(Module*, const void*)>("cuModuleLoadData");
  static auto* find = driver_symbol<int(Function*, Module, const char*)>("cuModuleGetFunction");
  if (!load || !find) return {Code::kDevice, "the CUDA driver cannot load modules"};
  Module module = nullptr;
  Function function = nullptr;
  if (int status = load(&module, source_); status != 0) return failed("cuModuleLoadData", status);
  if (int status = find(&function, module, name_); status != 0) {
    return failed("cuModuleGetFunction", status);
  }
  // Two threads may both get here; the second module stays loaded and does no harm.
  loaded_[device_ordinal].store(function, std::memory_order_release);
  return {};
}

Status PtxKernel::launch(int32_t device_ordinal, unsigned blocks_x, unsigned blocks_y,
                         unsigned threads, cudaStream_t stream, void** arguments) {
  ATTN_RETURN_IF_ERROR(load(device_ordinal));
  using Launch = int(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     cudaStream_t, void**, void**);
  static auto* launch = driver_symbol<Launch>("cuLaunchKernel");
  if (!launch) return {Code::kDevice, "the CUDA driver cannot launch kernels"};
  const Function function = loaded_[device_ordinal].load(std::memory_order_acquire);
  const int status =
      launch(function, blocks_x, blocks_y, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  return status == 0 ? Status{} : failed("cuLaunchKernel", status);
}

}  // namespace attn_dispatch
