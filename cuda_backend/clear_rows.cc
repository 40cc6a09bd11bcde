#include "clear_rows.h"

#include <array>
#include <atomic>
#include <string>

namespace attn_dispatch {
namespace {

constexpr int64_t kThreads = 128;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

// One block per kThreads rows, whose threads each read the flag of one row. It is PTX, which the
// driver compiles for the device, so that building the library needs no CUDA compiler.
//
//   first = kThreads * blockIdx.x;
//   mine = first + threadIdx.x;
//   if (!__syncthreads_or(mine < count && flags[mine] != 1)) return;
//   for (row = first; row < min(first + kThreads, count); ++row) {
//     if (flags[row] == 1) continue;
//     word = flags[row] == 0 ? 0 : 0xffffffff;
//     for (i = 16 * threadIdx.x; i < row_bytes; i += 16 * kThreads)
//       *(uint4*)(rows + row * row_bytes + i) = {word, word, word, word};
//   }
constexpr char kKernel[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry clear_rows(.param .u64 rows, .param .u64 flags, .param .u64 row_bytes,
                           .param .u64 count)
{
  .reg .pred %live, %dead, %done, %inside;
  .reg .u32 %flag, %thread, %block, %threads, %word;
  .reg .u64 %row, %end, %mine, %flags, %rows, %bytes, %i, %begin, %step, %address, %count;

  ld.param.u64 %flags, [flags];
  cvta.to.global.u64 %flags, %flags;
  ld.param.u64 %count, [count];
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %row, %block, %threads;
  cvt.u64.u32 %mine, %thread;
  add.u64 %mine, %mine, %row;

  mov.u32 %flag, 1;
  setp.lt.u64 %inside, %mine, %count;
  add.u64 %address, %flags, %mine;
  @%inside ld.global.u8 %flag, [%address];
  setp.ne.u32 %dead, %flag, 1;
  bar.red.or.pred %dead, 0, %dead;
  @!%dead ret;

  cvt.u64.u32 %end, %threads;
  add.u64 %end, %row, %end;
  min.u64 %end, %end, %count;
  ld.param.u64 %rows, [rows];
  cvta.to.global.u64 %rows, %rows;
  ld.param.u64 %bytes, [row_bytes];
  mul.wide.u32 %begin, %thread, 16;
  mul.wide.u32 %step, %threads, 16;

next_row:
  add.u64 %address, %flags, %row;
  ld.global.u8 %flag, [%address];
  setp.eq.u32 %live, %flag, 1;
  @%live bra row_done;
  setp.eq.u32 %dead, %flag, 0;
  selp.b32 %word, 0, 0xffffffff, %dead;
  mad.lo.u64 %address, %row, %bytes, %rows;
  add.u64 %address, %address, %begin;
  mov.u64 %i, %begin;
next_word:
  setp.ge.u64 %done, %i, %bytes;
  @%done bra row_done;
  st.global.v4.u32 [%address], {%word, %word, %word, %word};
  add.u64 %address, %address, %step;
  add.u64 %i, %i, %step;
  bra next_word;
row_done:
  add.u64 %row, %row, 1;
  setp.lt.u64 %inside, %row, %end;
  @%inside bra next_row;
  ret;
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
  ATTN_RETURN_IF_ERROR(check_ordinal(device_ordinal));
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
  // Two threads may both get here; the second module stays loaded and does no harm.
  loaded[device_ordinal].store(function, std::memory_order_release);
  return {};
}

Status clear_rows(void* rows, const void* flags, int64_t count, int64_t row_bytes,
                  int32_t device_ordinal, cudaStream_t stream) {
  if (row_bytes % kRowMultiple != 0 || reinterpret_cast<uintptr_t>(rows) % kRowMultiple != 0) {
    return {Code::kWrongCall,
            "rows to clear: expected bytes per row and an address that are multiples of " +
                std::to_string(kRowMultiple) + ", got " + std::to_string(row_bytes) + " bytes at " +
                std::to_string(reinterpret_cast<uintptr_t>(rows))};
  }
  if (count > kThreads * kMostBlocks) {
    return {Code::kWrongCall, "rows to clear: expected at most " +
                                  std::to_string(kThreads * kMostBlocks) + ", got " +
                                  std::to_string(count)};
  }
  ATTN_RETURN_IF_ERROR(load_clear_rows(device_ordinal));
  using Launch = int(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     cudaStream_t, void**, void**);
  static auto* launch = driver_symbol<Launch>("cuLaunchKernel");
  if (!launch) return {Code::kDevice, "the CUDA driver cannot launch kernels"};
  const Function function = loaded[device_ordinal].load(std::memory_order_acquire);
  void* arguments[] = {&rows, &flags, &row_bytes, &count};
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  const int status = launch(function, blocks, 1, 1, static_cast<unsigned>(kThreads), 1, 1, 0,
                            stream, arguments, nullptr);
  return status == 0 ? Status{} : failed("cuLaunchKernel", status);
}

}  // namespace attn_dispatch
