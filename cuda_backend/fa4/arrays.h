// The arrays of a call as the handlers get them, and their checks. Kernels trust every extent.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

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

// The extents of an array. They are held in place, as every call of a handler makes a shape for
// each of its arrays.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) : Shape(extents.begin(), extents.end()) {}
  Shape(const int64_t* begin, const int64_t* end)
      : rank_(end - begin), held_(std::min(rank_, kMostAxes)) {
    std::copy(begin, begin + held_, extents_.begin());
  }

  size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  const int64_t* begin() const { return extents_.data(); }
  const int64_t* end() const { return begin() + held_; }
  int64_t operator[](size_t axis) const { return extents_[axis]; }
  int64_t back() const { return extents_[held_ - 1]; }

  bool operator==(const Shape& other) const {
    return rank_ == other.rank_ && rank_ == held_ && std::equal(begin(), end(), other.begin());
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }

 private:
  // No kernel takes an array of more axes. Those of one that has more are not all held, and it
  // equals no other.
  static constexpr size_t kMostAxes = 6;

  std::array<int64_t, kMostAxes> extents_{};
  size_t rank_ = 0, held_ = 0;
};

struct Array {
  void* data = nullptr;
  ElementType type = ElementType::kOther;
  Shape shape;
  int64_t bytes = 0;
};

// What a kernel expects of an array: a name for messages, its type, the extents, and the multiple
// of bytes at which it begins.
struct Expected {
  const char* name;
  ElementType type;
  Shape shape;
  int64_t alignment;
};

// "float32 [1, 2, 3]".
std::string to_text(ElementType type, const Shape& shape);

// The product of extents; -1 if one is negative, or the product is more than a process can address.
int64_t product(const Shape& extents);

// Compares type, every extent, the size in bytes, and the address.
Status check_array(const Array& array, const Expected& expected);

}  // namespace attn_dispatch
