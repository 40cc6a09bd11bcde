// A launch as text.
#include <hip/hip_runtime_api.h>

#include "fake_hip.h"

std::string fake_hip::Describe(const std::array<unsigned, 4>& sizes, void** extra) {
  std::string line;
  for (unsigned size : sizes) line += std::to_string(size) + " ";
  // {HIP_LAUNCH_PARAM_BUFFER_POINTER, data, HIP_LAUNCH_PARAM_BUFFER_SIZE, &size, end}
  const auto* bytes = static_cast<const unsigned char*>(extra[1]);
  const size_t count = *static_cast<const size_t*>(extra[3]);
  for (size_t i = 0; i < count; ++i) {
    for (int nibble : {bytes[i] >> 4, bytes[i] & 15}) line += "0123456789abcdef"[nibble];
  }
  return line + "\n";
}
