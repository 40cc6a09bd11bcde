#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "arrays.h"

namespace attn_dispatch {

// Narrows to the int32 that AITER takes.
class Narrow {
 public:
  explicit Narrow(Arrays& arrays) : arrays_(arrays) {}
  int32_t operator()(int64_t value) const {
    if (value > std::numeric_limits<int32_t>::max()) {
      arrays_.fail("a stride of " + std::to_string(value) + " elements does not fit AITER's int32");
    }
    return static_cast<int32_t>(value);
  }

 private:
  Arrays& arrays_;
};

}  // namespace attn_dispatch
