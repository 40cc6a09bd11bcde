#include "clear_rows.h"

#include <algorithm>
#include <array>
#include <string>

#include "ptx_kernel.h"

namespace attn_dispatch {
namespace {

constexpr unsigned kThreads = 128;
constexpr int64_t kBlockRows = 32;  // few, so that a run of padding is spread over the device
constexpr int64_t kMostRows = ((int64_t{1} << 31) - 1) * kBlockRows;

// A block for kBlockRows rows of array blockIdx.y. It is PTX, which the driver compiles for the
// device, so that building the library needs no CUDA compiler.
//
//   {rows, flags, row_bytes, count} = arrays[blockIdx.y];
//   first = kBlockRows * blockIdx.x;
//   mine = first + threadIdx.x % kBlockRows;
//   if (!__syncthreads_or(mine < count && flags[mine] != 1)) return;
//   for (row = first; row < min(first + kBlockRows, count); ++row) {
//     if (flags[row] == 1) continue;
//     word = flags[row] == 0 ? 0 : 0xffffffff;
//     for (i = 16 * threadIdx.x; i < row_bytes; i += 16 * kThreads)
//       *(uint4*)(rows + row * row_bytes + i) = {word, word, word, word};
//   }
constexpr char kKernel[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry clear_rows(.param .align 8 .b8 arrays[128])
{
  .reg .pred %live, %dead, %done, %inside;
  .reg .u32 %flag, %thread, %block, %threads, %word, %lane;
  .reg .u64 %array, %row, %end, %mine, %flags, %rows, %bytes, %i, %begin, %step, %address, %count;

  mov.u64 %array, arrays;
  mov.u32 %block, %ctaid.y;
  mul.wide.u32 %begin, %block, 32;
  add.u64 %array, %array, %begin;
  ld.param.u64 %rows, [%array];
  cvta.to.global.u64 %rows, %rows;
  ld.param.u64 %flags, [%array+8];
  cvta.to.global.u64 %flags, %flags;
  ld.param.u64 %bytes, [%array+16];
  ld.param.u64 %count, [%array+24];
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %row, %block, 32;
  and.b32 %lane, %thread, 31;
  cvt.u64.u32 %mine, %lane;
  add.u64 %mine, %mine, %row;

  mov.u32 %flag, 1;
  setp.lt.u64 %inside, %mine, %count;
  add.u64 %address, %flags, %mine;
  @%inside ld.global.u8 %flag, [%address];
  setp.ne.u32 %dead, %flag, 1;
  bar.red.or.pred %dead, 0, %dead;
  @!%dead ret;

  add.u64 %end, %row, 32;
  min.u64 %end, %end, %count;
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

static_assert(sizeof(FlaggedRows) == 32, "the kernel's parameter has 4 of these");

PtxKernel kernel(kKernel, "clear_rows");

Status check(const FlaggedRows& array) {
  const auto address = reinterpret_cast<uintptr_t>(array.rows);
  if (array.row_bytes % kRowMultiple != 0 || address % kRowMultiple != 0) {
    return {Code::kWrongCall,
            "rows to clear: expected bytes per row and an address that are multiples of " +
                std::to_string(kRowMultiple) + ", got " + std::to_string(array.row_bytes) +
                " bytes at " + std::to_string(address)};
  }
  if (array.count > kMostRows) {
    return {Code::kWrongCall, "rows to clear: expected at most " + std::to_string(kMostRows) +
                                  ", got " + std::to_string(array.count)};
  }
  return {};
}

}  // namespace

Status load_clear_rows(int32_t device_ordinal) { return kernel.load(device_ordinal); }

Status clear_rows(const FlaggedRows* arrays, size_t number, int32_t device_ordinal,
                  cudaStream_t stream) {
  if (number > kMostArrays) {
    return {Code::kWrongCall, "arrays to clear: expected at most " + std::to_string(kMostArrays) +
                                  ", got " + std::to_string(number)};
  }
  std::array<FlaggedRows, kMostArrays> given{};
  int64_t most = 0;
  for (size_t i = 0; i < number; ++i) {
    ATTN_RETURN_IF_ERROR(check(arrays[i]));
    given[i] = arrays[i];
    most = std::max(most, given[i].count);
  }
  if (most == 0) return {};
  void* arguments[] = {given.data()};
  const auto blocks = static_cast<unsigned>((most + kBlockRows - 1) / kBlockRows);
  return kernel.launch(device_ordinal, blocks, static_cast<unsigned>(number), kThreads, stream,
                       arguments);
}

}  // namespace attn_dispatch
