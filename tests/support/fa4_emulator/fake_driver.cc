// A CUDA driver that writes down what is loaded and launched, and runs no kernels but those that
// clear rows, as their comments say. Its device memory is the host's. The handlers' module opens it
// in place of the real one (module.cc).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "clear_ends.h"
#include "clear_rows.h"

namespace {

using attn_dispatch::EndsToClear;
using attn_dispatch::FlaggedRows;

std::string log_text;
std::map<std::uintptr_t, std::string> kernels;
int failing_call = 0;
std::string failing_name;

template <typename... Arguments>
void note(const char* format, Arguments... arguments) {
  char line[512];
  std::snprintf(line, sizeof line, format, arguments...);
  log_text += line;
  log_text += '\n';
}

// Fails the call of this name that fake_fail announced.
int result_of(const char* name) {
  if (failing_name != name || --failing_call > 0) return 0;
  failing_name.clear();
  return 2;  // CUDA_ERROR_OUT_OF_MEMORY
}

struct Attribute {  // CUlaunchAttribute
  int32_t id;
  char padding[4];
  int32_t value[16];
};

struct Config {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_memory;
  void* stream;
  const Attribute* attributes;
  uint32_t count;
};

// clear_rows.cc
void clear(const FlaggedRows& array, unsigned blocks) {
  constexpr int64_t kBlockRows = 32;
  for (int64_t row = 0; row < std::min(array.count, blocks * kBlockRows); ++row) {
    const auto flag = static_cast<const uint8_t*>(array.flags)[row];
    if (flag == 1) continue;
    std::memset(static_cast<char*>(array.rows) + row * array.row_bytes, flag == 0 ? 0 : 0xff,
                array.row_bytes);
  }
}

// clear_ends.cc
void clear(const EndsToClear& array, unsigned) {
  const auto* offsets = static_cast<const int32_t*>(array.offsets);
  const int64_t begin = std::clamp<int64_t>(offsets[0], 0, array.rows);
  const int64_t end = std::clamp<int64_t>(offsets[array.last], 0, array.rows);
  const int64_t from = begin > 0 ? 0 : end, to = begin > 0 ? begin : array.rows;
  for (int64_t time = 0; time < array.times; ++time) {
    auto* words = static_cast<uint32_t*>(array.words) + time * array.rows * array.row_words;
    std::fill(words + from * array.row_words, words + to * array.row_words,
              begin > 0 ? array.invalid : array.padding);
  }
}

}  // namespace

extern "C" {

const char* fake_log() { return log_text.c_str(); }
void fake_clear() { log_text.clear(); }
void fake_fail(const char* name, int call) {
  failing_name = name;
  failing_call = call;
}

int cuLibraryLoadData(void** library, const void* code, void*, void**, unsigned, void*, void**,
                      unsigned) {
  note("load %.4s", std::memcmp(code, "\177ELF", 4) == 0 ? "ELF" : "not an ELF");
  *library = const_cast<void*>(code);
  return result_of("cuLibraryLoadData");
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  kernels[reinterpret_cast<std::uintptr_t>(library)] = name;
  *kernel = library;
  return result_of("cuLibraryGetKernel");
}

int cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return result_of("cuKernelGetAttribute");
}

int cuKernelSetAttribute(int attribute, int value, void*, int device) {
  note("set %d=%d on %d", attribute, value, device);
  return result_of("cuKernelSetAttribute");
}

int cuDeviceGetAttribute(int* value, int, int) {
  *value = 232448;  // an H100's shared memory of a block, in bytes
  return result_of("cuDeviceGetAttribute");
}

int cuCtxGetDevice(int* device) {
  *device = 0;
  return result_of("cuCtxGetDevice");
}

int cuGetErrorName(int result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

int cuLaunchKernelEx(const Config* config, void* kernel, void**, void**) {
  note("launch grid %u,%u,%u block %u shared %u of %s", config->grid[0], config->grid[1],
       config->grid[2], config->block[0], config->shared_memory,
       kernels[reinterpret_cast<std::uintptr_t>(kernel)].c_str());
  return result_of("cuLaunchKernelEx");
}

int cuModuleLoadData(void** module, const void* code) {
  *module = const_cast<void*>(code);
  return result_of("cuModuleLoadData");
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  kernels[reinterpret_cast<std::uintptr_t>(module)] = name;
  *function = module;
  return result_of("cuModuleGetFunction");
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned, unsigned, unsigned, unsigned,
                   unsigned, void*, void** arguments, void**) {
  if (const int result = result_of("cuLaunchKernel")) return result;
  const bool by_flags = kernels[reinterpret_cast<std::uintptr_t>(function)] == "clear_rows";
  for (unsigned i = 0; i < y; ++i) {
    if (by_flags) clear(static_cast<const FlaggedRows*>(arguments[0])[i], x);
    if (!by_flags) clear(static_cast<const EndsToClear*>(arguments[0])[i], x);
  }
  return 0;
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return result_of("cuMemcpyDtoDAsync");
}

int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void*) {
  note("fill %zu with %d", bytes, value);
  if (const int result = result_of("cuMemsetD8Async")) return result;
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return 0;
}
}
