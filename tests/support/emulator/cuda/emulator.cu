// The emulator on an NVIDIA GPU: the arithmetic of cpu.cc, one thread per row, queued on the
// stream. It shows what the emulator on a CPU cannot: that the handlers work where calls are queued
// and the host cannot read device memory. For the latter reason sequences and pages are not checked
// here. The code is not written for speed.
//
// Built by build.cuda_library(), and by hip_on_nvidia.py into a module with rocm_backend.
#include <cuda_runtime.h>

#include "checks.h"
#include "computations.h"
#include "export.h"
#include "hooks.h"

namespace attn_emulator {
namespace {

constexpr int kThreads = 64;

__global__ void poison_kernel(Array array, int64_t elements) {
  int64_t rest = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (rest >= elements) return;
  int64_t at = 0;
  for (const Axis& axis : array.axes) {
    at += rest % axis.size * axis.stride;
    rest /= axis.size;
  }
  auto* element = static_cast<unsigned char*>(const_cast<void*>(array.start));
  memset(element + at * array.element_bytes, 0xff, array.element_bytes);
}

// Sets this thread's sequence, head and row; false if there are more threads than rows.
__device__ bool find_place(const AttnAiterCall& call, int32_t rows, Sequence& s, int32_t& head,
                           int32_t& row) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (index >= static_cast<int64_t>(call.batch) * call.num_heads * rows) return false;
  row = static_cast<int32_t>(index % rows);
  head = static_cast<int32_t>(index / rows % call.num_heads);
  s = sequence_of(call, static_cast<int32_t>(index / rows / call.num_heads));
  return true;
}

enum class Side { kQuery, kKey };

// Computes one row of queries or keys on each thread.
template <Side side, auto compute, typename Call, typename... Options>
__global__ void row_kernel(Call call, Options... options) {
  constexpr bool is_key = side == Side::kKey;
  Sequence s;
  int32_t head, row;
  const int32_t rows = is_key ? call.call.max_seq_len_kv : call.call.max_seq_len_q;
  if (!find_place(call.call, rows, s, head, row)) return;
  if (row < (is_key ? s.len_k : s.len_q)) compute(call, options..., s, head, row);
}

__device__ void split_kv_row(const AttnAiterSplitKv& split, const Sequence& whole, int32_t head,
                             int32_t row) {
  const Sequence s = row_of(split, whole.index);
  for (int32_t part = 0; part < split.num_splits; ++part) split_row(split, s, head, row, part);
  combine_row(split, s, head, row);
}

constexpr auto forward_kernel = row_kernel<Side::kQuery, forward_row, AttnAiterForward>;
constexpr auto softmax_d_kernel = row_kernel<Side::kQuery, softmax_d_row, AttnAiterBackward>;
constexpr auto dq_kernel = row_kernel<Side::kQuery, dq_row, AttnAiterBackward, bool>;
constexpr auto key_kernel = row_kernel<Side::kKey, key_row, AttnAiterBackward>;
constexpr auto convert_dq_kernel = row_kernel<Side::kQuery, convert_dq_row, AttnAiterBackward>;
constexpr auto split_kv_kernel = row_kernel<Side::kQuery, split_kv_row, AttnAiterSplitKv>;

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, void* stream, Arguments... arguments) {
  if (threads == 0) return;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
}

void poison(const std::vector<Array>& arrays, void* stream) {
  for (const Array& array : arrays) {
    if (array.access != Access::kWritten || array.is_empty()) continue;
    int64_t elements = 1;
    for (const Axis& axis : array.axes) elements *= axis.size;
    launch(poison_kernel, elements, stream, array, elements);
  }
}

std::string launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

int64_t threads_for(const AttnAiterCall& call, int32_t rows) {
  return static_cast<int64_t>(call.batch) * call.num_heads * rows;
}

cudaError_t load_kernels() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(poison_kernel),
      reinterpret_cast<const void*>(forward_kernel),
      reinterpret_cast<const void*>(softmax_d_kernel),
      reinterpret_cast<const void*>(dq_kernel),
      reinterpret_cast<const void*>(key_kernel),
      reinterpret_cast<const void*>(convert_dq_kernel),
      reinterpret_cast<const void*>(split_kv_kernel),
  };
  for (const void* kernel : kernels) {
    cudaFuncAttributes ignored;
    if (const cudaError_t error = cudaFuncGetAttributes(&ignored, kernel); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

std::string run(const AttnAiterForward& forward, void* stream) {
  if (std::string why = refusal(forward); !why.empty()) return why;
  const std::vector<Array> arrays = arrays_of(forward);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  poison(arrays, stream);
  launch(forward_kernel, threads_for(forward.call, forward.call.max_seq_len_q), stream, forward);
  return launch_error();
}

std::string run(const AttnAiterSplitKv& split, void* stream) {
  if (std::string why = refusal(split); !why.empty()) return why;
  const std::vector<Array> arrays = arrays_of(split);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  poison(arrays, stream);
  launch(split_kv_kernel, threads_for(split.call, split.call.seq_len_q), stream, split);
  return launch_error();
}

std::string run(const AttnAiterBackward& backward, void* stream) {
  const std::string on = arch();
  if (std::string why = refusal(backward, on); !why.empty()) return why;
  const bool direct = is_direct(backward, on);
  const std::vector<Array> arrays = arrays_of(backward, direct);
  if (std::string why = misfit(arrays); !why.empty()) return why;
  poison(arrays, stream);
  const AttnAiterCall& call = backward.call;
  const int64_t queries = threads_for(call, call.max_seq_len_q);
  launch(softmax_d_kernel, queries, stream, backward);
  launch(dq_kernel, queries, stream, backward, direct);
  launch(key_kernel, threads_for(call, call.max_seq_len_kv), stream, backward);
  if (!direct) launch(convert_dq_kernel, queries, stream, backward);
  return launch_error();
}

}  // namespace attn_emulator

// For emulator_on_nvidia.py, which does not use CUDA: memory that host and device reach, and
// waiting.
ATTN_EXPORT void* attn_emulator_cuda_memory(int64_t bytes) {
  void* memory = nullptr;
  return cudaMallocManaged(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

ATTN_EXPORT const char* attn_emulator_cuda_wait(void) {
  return cudaGetErrorString(cudaDeviceSynchronize());
}

// Loads the kernels on the current device, so that none is loaded while a stream is captured.
ATTN_EXPORT const char* attn_emulator_cuda_load(void) {
  return cudaGetErrorString(attn_emulator::load_kernels());
}
