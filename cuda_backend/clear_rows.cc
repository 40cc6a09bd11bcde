#include "clear_rows.h"

#include <array>
#include <atomic>
#include <string>

namespace attn_dispatch {
namespace {

constexpr int32_t kMaxDevices = 64;
constexpr unsigned kThreads = 128;

// A block for each row. In PTX, which the driver compiles for the device it finds: so the library
// needs no CUDA compiler to be built.
//
//   if (flags[blockIdx.x] == 1) return;
//   word = flags[blockIdx.x] == 0 ? 0 : 0xffffffff;
//   for (i = 16 * threadIdx.x; i < row_bytes; i += 16 * blockDim.x)
//     *(uint4*)(rows + blockIdx.x * row_bytes + i) = {word, word, word, word};
constexpr char kKernel[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry clear_rows(.param .u64 rows, .param .u64 flags, .param .u64 row_bytes)
{
  .reg .pred %live, %dead, %done;
  .reg .u32 %flag, %thread, %block, %threads, %word;
  .reg .u64 %row, %flags, %bytes, %i, %step, %address;

  ld.param.u64 %flags, [flags];
  mov.u32 %block, %ctaid.x;
  cvt.u64.u32 %row, %block;
  add.u64 %flags, %flags, %row;
  cvta.to.global.u64 %flags, %flags;
  ld.global.u8 %flag, [%flags];
  setp.eq.u32 %live, %flag, 1;
  @%live ret;

  ld.param.u64 %address, [rows];
  ld.param.u64 %bytes, [row_bytes];
  mad.lo.u64 %address, %row, %bytes, %address;
  cvta.to.global.u64 %address, %address;
  setp.eq.u32 %dead, %flag, 0;
  selp.b32 %word, 0, 0xffffffff, %dead;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %i, %thread, 16;
  mov.u32 %threads, %ntid.x;
  mul.wide.u32 %step, %threads, 16;
  add.u64 %address, %address, %i;
next:
  setp.ge.u64 %done, %i, %bytes;
  @%done ret;
  st.global.v4.u32 [%address], {%word, %word, %word, %word};
  add.u64 %address, %address, %step;
  add.u64 %i, %i, %step;
  bra next;
}
)";

using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;

std::array<std::atomic<Function>, kMaxDevices> loaded{};

Status failed(const char* call, int status) {
  return {Code::kDevice, std::string(call) + " failed with status " + std::to_string(status)};
}

}  // namespace

Status load_clear_rows(int32_t device_ordinal) {
  if (device_ordinal < 0 || device_ordinal >= kMaxDevices) {
    return {Code::kDevice, "device ordinal " + std::to_string(device_ordinal) + " is out of range"};
  }
  if (loaded[device_ordinal].load(std::memory_order_acquire)) return {};
  static auto* load = driver_symbol<int(Module*, const void*)>("cuModuleLoadData");
  static auto* find = driver_symbol<int(Function*, Module, const char*)>("cuModuleGetFunction");
  if (!load || !find) return {Code::kDevice, "the CUDA driver cannot load modules"};
  Module module = nullptr;
  Function function = nullptr;
  if (int status = load(&module, kKernel); status != 0) return failed("cuModuleLoadData", status);
  if (int status = find(&function, module, "clear_rows"); status != 0) {
    return failed("cuModuleGetFunction", status);
  }
  // Two threads may both come here; one module too many stays loaded, and does no harm.
  loaded[device_ordinal].store(function, std::memory_order_release);
  return {};
}

Status clear_rows(void* rows, const void* flags, int64_t count, int64_t row_bytes,
                  int32_t device_ordinal, cudaStream_t stream) {
  ATTN_RETURN_IF_ERROR(load_clear_rows(device_ordinal));
  using Launch = int(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     cudaStream_t, void**, void**);
  static auto* launch = driver_symbol<Launch>("cuLaunchKernel");
  if (!launch) return {Code::kDevice, "the CUDA driver cannot launch kernels"};
  const Function function = loaded[device_ordinal].load(std::memory_order_acquire);
  void* arguments[] = {&rows, &flags, &row_bytes};
  const int status = launch(function, static_cast<unsigned>(count), 1, 1, kThreads, 1, 1, 0, stream,
                            arguments, nullptr);
  return status == 0 ? Status{} : failed("cuLaunchKernel", status);
}

}  // namespace attn_dispatch
