// FlashAttention-4's compiled kernels: the library that `attn-dispatch build-fa4` made, which
// Python names, and its kernels on the devices of this process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fa4_library.h"
#include "library.h"
#include "status.h"

namespace attn_dispatch {

// The arrays that a variant's change of scores reads, of at most kMostModArrays.
constexpr size_t kMostModArrays = 16;
struct ModArrays {
  std::array<AttnFa4ModArray, kMostModArrays> arrays;
  size_t count = 0;
};

// A kernel whose code is loaded on first use, once for all devices, and prepared once for each.
class CompiledKernel {
 public:
  explicit CompiledKernel(const AttnFa4Kernel& kernel) : kernel_(kernel) {}

  bool exists() const { return kernel_.run != nullptr; }

  // Loads the kernel on the current device, which has this ordinal. Must not be called inside a
  // stream capture.
  Status load(int32_t ordinal);

  // Queues the kernel on a device where it is loaded. Arrays are structs of fa4_library.h.
  template <typename... Arrays>
  Status operator()(cudaStream_t stream, float scale, Arrays... arrays) const {
    return with_mod(ModArrays{}, stream, scale, arrays...);
  }

  // The same with the arrays of a variant after the others.
  template <typename... Arrays>
  Status with_mod(ModArrays mod, cudaStream_t stream, float scale, Arrays... arrays) const {
    int32_t result = 0;
    void* arguments[sizeof...(Arrays) + kMostModArrays + 3] = {&arrays...};
    size_t count = sizeof...(Arrays);
    for (size_t i = 0; i < mod.count; ++i) arguments[count++] = &mod.arrays[i];
    for (void* last :
         {static_cast<void*>(&scale), static_cast<void*>(&stream), static_cast<void*>(&result)}) {
      arguments[count++] = last;
    }
    return run(arguments, static_cast<int32_t>(count), &result);
  }

 private:
  Status run(void** arguments, int32_t count, const int32_t* result) const;
  Status load_code();

  const AttnFa4Kernel kernel_;
  std::mutex mutex_;
  void* code_ = nullptr;
  std::atomic<uint64_t> devices_{0};
  static_assert(kMaxDevices <= 64, "devices_ has a bit for each");
};

// The two forms of a mask: intervals of keys for each row, or one bit for each pair.
enum class MaskForm { kRows, kBits };

// The kernels that read a mask of one form.
struct MaskedKernels {
  CompiledKernel forward, forward_sinks, backward, backward_grouped, tangent;
};

// The kernels of calls with wide heads, causal or not, which read no mask.
struct WideKernels {
  CompiledKernel forward, key_grads, query_grad;
};

// A set of kernels, and what it is for.
struct CompiledSet {
  explicit CompiledSet(const AttnFa4Set& set)
      : facts(set),
        by_rows{CompiledKernel(set.forward), CompiledKernel(set.forward_sinks),
                CompiledKernel(set.backward), CompiledKernel(set.backward_grouped),
                CompiledKernel(set.tangent)},
        by_bits{CompiledKernel(set.forward_bits), CompiledKernel(set.forward_bits_sinks),
                CompiledKernel(set.backward_bits), CompiledKernel(set.backward_bits_grouped),
                CompiledKernel(set.tangent_bits)},
        preprocess(set.preprocess),
        query_grad(set.query_grad),
        key_value_grad(set.key_value_grad),
        wide_full{CompiledKernel(set.wide_forward), CompiledKernel(set.wide_key_grads),
                  CompiledKernel(set.wide_query_grad)},
        wide_causal{CompiledKernel(set.wide_forward_causal),
                    CompiledKernel(set.wide_key_grads_causal),
                    CompiledKernel(set.wide_query_grad_causal)} {}

  MaskedKernels& masked(MaskForm form) { return form == MaskForm::kBits ? by_bits : by_rows; }
  const MaskedKernels& masked(MaskForm form) const {
    return form == MaskForm::kBits ? by_bits : by_rows;
  }

  WideKernels& wide(bool is_causal) { return is_causal ? wide_causal : wide_full; }
  const WideKernels& wide(bool is_causal) const { return is_causal ? wide_causal : wide_full; }

  const AttnFa4Set& facts;
  MaskedKernels by_rows, by_bits;
  CompiledKernel preprocess, query_grad, key_value_grad;
  WideKernels wide_full, wide_causal;

  bool takes_sinks() const { return by_rows.forward_sinks.exists(); }
};

struct CompiledLibrary {
  std::string path;
  std::string versions;
  std::vector<std::unique_ptr<CompiledSet>> sets;

  CompiledSet* find(const std::string& name) const;
};

// Loads the library from a path, which Python has judged (devices/code_files.py). The first success
// is final: a process uses one.
Result<const CompiledLibrary*> load_compiled_library(const std::string& path);

// The library that this process has loaded; null if none.
const CompiledLibrary* compiled_library();

}  // namespace attn_dispatch
