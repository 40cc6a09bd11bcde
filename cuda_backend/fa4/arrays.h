// The arrays of a call as the handlers get them, and their checks. Kernels trust every extent.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "status.h"

namespace attn_dispatch {

enum class ElementType { kFloat16, kBFloat16, kFloat32, kInt32, kUInt32, kOther };

inline const char* type_name(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kUInt32:
      return "uint32";
    case ElementType::kOther:
      break;
  }
  return "another type";
}

struct Array {
  void* data = nullptr;
  ElementType type = ElementType::kOther;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// What a kernel expects of an array: a name for messages, its type, the extents, and the multiple
// of bytes at which it begins.
struct Expected {
  const char* name;
  ElementType type;
  std::vector<int64_t> shape;
  int64_t alignment;
};

// "float32 [1, 2, 3]".
std::string to_text(ElementType type, const std::vector<int64_t>& shape);

// The product of extents; -1 if one is negative, or the product is more than a process can address.
int64_t product(const std::vector<int64_t>& extents);

// Compares type, every extent, the size in bytes, and the address.
Status check_array(const Array& array, const Expected& expected);

}  // namespace attn_dispatch
