// Takes the place of AITER's header of this name, which needs a HIP compiler: the same names, as
// far as its attention files use them, for any C++ compiler. It also declares what HIP 5 lacks.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#define hipDeviceAttributePciChipId static_cast<hipDeviceAttribute_t>(10019)
extern "C" hipError_t hipGetFuncBySymbol(hipFunction_t* function, const void* symbol);

namespace ck_tile {

using index_t = int32_t;

struct stream_config {
  hipStream_t stream_id_ = nullptr;
  bool time_kernel_ = false;
  int log_level_ = 0;
};

template <typename T>
constexpr T log2e_v = static_cast<T>(1.4426950408889634);

// Calls each of the launches in turn, until HIP has an error.
template <typename... Launches>
float launch_kernel(const stream_config& config, Launches&&... launches) {
  const bool ok = ((launches(config), hipPeekAtLastError() == hipSuccess) && ...);
  if (!ok) throw std::runtime_error(hipGetErrorString(hipGetLastError()));
  return 0;
}

}  // namespace ck_tile

enum class mask_enum { no_mask = 0, mask_top_left, mask_bottom_right, window_generic };
enum class bias_enum { no_bias = 0, elementwise_bias = 1, alibi = 2 };

// The mask of a window as the keys (y, x) where its two edges start: below and right of the corner.
inline std::pair<int, int> compute_mask_coordinates(int left, int right, int, int queries, int keys,
                                                    bool is_top_left) {
  if (left < 0) left = (is_top_left ? queries : keys) - 1;
  if (right < 0) right = (is_top_left ? keys : queries) - 1;
  const int shift = is_top_left ? 0 : keys - queries;
  return {1 + left - shift, 1 + right + shift};
}
