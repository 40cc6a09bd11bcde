// The adapter in front of AITER: its exported table, and what needs none of AITER's headers.
#include "aiter_adapter.h"

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "aiter_environment.h"

namespace attn_dispatch::aiter_adapter {

int Fail(char* message, int32_t size, const std::string& sentence) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, static_cast<size_t>(size), "%s", sentence.c_str());
  }
  return 1;
}

std::string DtypeName(const AttnAiterCall& call) {
  return call.dtype == ATTN_AITER_BF16 ? "bf16" : "fp16";
}

std::string Describe(const AttnAiterCall& call) {
  static constexpr const char* kMasks[] = {"no mask", "top-left mask", "bottom-right mask"};
  static constexpr const char* kBiases[] = {"no bias", "bias", "ALiBi"};
  const auto text = [](long long value) { return std::to_string(value); };
  return DtypeName(call) + (call.is_group ? ", packed, " : ", ") + text(call.batch) +
         " sequences of " + text(call.max_seq_len_q) + " queries and " + text(call.max_seq_len_kv) +
         " keys, " + text(call.num_heads) + " heads over " + text(call.num_kv_heads) +
         ", head dims " + text(call.head_dim) + " and " + text(call.head_dim_v) + ", " +
         kMasks[call.mask % 3] + " with window (" + text(call.window_left) + ", " +
         text(call.window_right) + "), " + kBiases[call.bias_kind % 3] + ", dropout " +
         std::to_string(call.dropout_rate) + (call.use_asm ? ", ASM" : ", CK");
}

std::optional<std::string> AsmFolderError(const char* subfolder) {
  const std::string& folder = AsmFolder();
  std::error_code ignored;
  // AITER appends its file names to the folder as they are.
  if (!folder.empty() && std::filesystem::is_directory(folder + subfolder, ignored)) return {};
  return "AITER's ASM kernels are missing: there is no folder " +
         (folder.empty() ? "hsa/gfx…/" : folder) + subfolder +
         " beside its libraries; build them again with `attn-dispatch build-aiter`";
}

namespace {

int DeviceArch(char* arch, int32_t arch_size, char* message, int32_t message_size) {
  const HipErrorScope hip_errors;
  int device = 0;
  hipDeviceProp_t properties;
  hipError_t error = hipGetDevice(&device);
  if (error == hipSuccess) error = hipGetDeviceProperties(&properties, device);
  if (error != hipSuccess) {
    return Fail(message, message_size,
                std::string("HIP cannot say which GPU this is: ") + hipGetErrorString(error));
  }
  // "gfx942:sramecc+:xnack-"
  const size_t length = std::strcspn(properties.gcnArchName, ":");
  if (arch == nullptr || static_cast<size_t>(arch_size) <= length) {
    return Fail(message, message_size,
                "the name of the GPU needs " + std::to_string(length + 1) + " bytes, got " +
                    std::to_string(arch_size));
  }
  std::memcpy(arch, properties.gcnArchName, length);
  arch[length] = '\0';
  return 0;
}

}  // namespace
}  // namespace attn_dispatch::aiter_adapter

extern "C" __attribute__((visibility("default"))) const AttnAiter* attn_dispatch_aiter(void) {
  namespace adapter = attn_dispatch::aiter_adapter;
  static const AttnAiter table = {
      ATTN_AITER_API_VERSION, adapter::Generation(),    adapter::ArchOfBuild(),
      adapter::DeviceArch,    adapter::Forward,         adapter::Backward,
      adapter::SplitKv,       adapter::ForwardTakesAsm, adapter::BackwardTakesAsm,
  };
  return &table;
}
