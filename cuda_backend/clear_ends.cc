#include "clear_ends.h"

#include <algorithm>
#include <array>
#include <string>

#include "ptx_kernel.h"

namespace attn_dispatch {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocks = 264;  // two for each processor of an H100; without padding they end

// Blocks take turns at the words of array blockIdx.y.
//
//   {words, offsets, last, row_words, rows, times, padding, invalid} = arrays[blockIdx.y];
//   begin = clamp(offsets[0], 0, rows);
//   end = clamp(offsets[last], 0, rows);
//   word = begin > 0 ? invalid : padding;
//   from = begin > 0 ? 0 : end * row_words;
//   to = (begin > 0 ? begin : rows) * row_words;
//   from += blockIdx.x * blockDim.x + threadIdx.x;
//   if (from >= to) return;
//   for (; times > 0; --times, words += rows * row_words)
//     for (i = from; i < to; i += gridDim.x * blockDim.x) words[i] = word;
constexpr char kKernel[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry clear_ends(.param .align 8 .b8 arrays[224])
{
  .reg .pred %wrong, %done, %more;
  .reg .u32 %block, %threads, %blocks, %thread, %word, %invalid, %number;
  .reg .u64 %array, %place, %words, %last, %width, %times, %from, %to, %i, %step, %size, %address;
  .reg .s64 %begin, %end, %rows;

  mov.u64 %array, arrays;
  mov.u32 %block, %ctaid.y;
  mul.wide.u32 %place, %block, 56;
  add.u64 %array, %array, %place;
  ld.param.u64 %words, [%array];
  cvta.to.global.u64 %words, %words;
  ld.param.u64 %place, [%array+8];
  cvta.to.global.u64 %place, %place;
  ld.param.u64 %last, [%array+16];
  ld.param.u64 %width, [%array+24];
  ld.param.u64 %rows, [%array+32];
  ld.param.u64 %times, [%array+40];
  ld.param.u32 %word, [%array+48];
  ld.param.u32 %invalid, [%array+52];

  ld.global.s32 %begin, [%place];
  mad.lo.u64 %place, %last, 4, %place;
  ld.global.s32 %end, [%place];
  max.s64 %begin, %begin, 0;
  min.s64 %begin, %begin, %rows;
  max.s64 %end, %end, 0;
  min.s64 %end, %end, %rows;

  mul.lo.u64 %size, %rows, %width;
  mul.lo.u64 %from, %end, %width;
  mov.u64 %to, %size;
  setp.gt.s64 %wrong, %begin, 0;
  @%wrong mov.u64 %from, 0;
  @%wrong mul.lo.u64 %to, %begin, %width;
  @%wrong mov.u32 %word, %invalid;

  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %number, %block, %threads, %thread;
  cvt.u64.u32 %i, %number;
  add.u64 %from, %from, %i;
  mul.wide.u32 %step, %blocks, %threads;
  setp.ge.u64 %done, %from, %to;
  @%done ret;

next_time:
  setp.eq.u64 %done, %times, 0;
  @%done ret;
  mov.u64 %i, %from;
next_word:
  mad.lo.u64 %address, %i, 4, %words;
  st.global.u32 [%address], %word;
  add.u64 %i, %i, %step;
  setp.lt.u64 %more, %i, %to;
  @%more bra next_word;
  mad.lo.u64 %words, %size, 4, %words;
  sub.u64 %times, %times, 1;
  bra next_time;
}
)";

static_assert(sizeof(EndsToClear) == 56, "the kernel's parameter has 4 of these");

PtxKernel kernel(kKernel, "clear_ends");

}  // namespace

Status load_clear_ends(int32_t device_ordinal) { return kernel.load(device_ordinal); }

Status clear_ends(const EndsToClear* arrays, size_t number, int32_t device_ordinal,
                  cudaStream_t stream) {
  if (number > kMostEnds) {
    return {Code::kWrongCall, "arrays to clear: expected at most " + std::to_string(kMostEnds) +
                                  ", got " + std::to_string(number)};
  }
  if (number == 0) return {};
  std::array<EndsToClear, kMostEnds> given{};
  std::copy_n(arrays, number, given.begin());
  void* arguments[] = {given.data()};
  return kernel.launch(device_ordinal, kBlocks, static_cast<unsigned>(number), kThreads, stream,
                       arguments);
}

}  // namespace attn_dispatch
