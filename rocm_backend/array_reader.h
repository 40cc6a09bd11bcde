// Reads the buffers of one execution one after the other, and checks their dtypes and shapes.
#pragma once

#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "status.h"
#include "xla/ffi/api/ffi.h"

// The tests' emulator defines this to learn how large every buffer is, and checks each access.
#ifndef ATTN_DISPATCH_NOTE_BUFFER
#define ATTN_DISPATCH_NOTE_BUFFER(data, bytes) (void)0
#endif

namespace attn_dispatch {

using Dims = std::vector<int64_t>;

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

struct Array {
  void* data = nullptr;
  Dims dims;
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  size_t bytes = 0;
};

inline std::string dtype_name(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::DataType::F16:
      return "float16";
    case xla::ffi::DataType::BF16:
      return "bfloat16";
    case xla::ffi::DataType::F32:
      return "float32";
    case xla::ffi::DataType::S32:
      return "int32";
    case xla::ffi::DataType::U32:
      return "uint32";
    default:
      return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

// "bfloat16 [2, 8, 4, 16]"
inline std::string describe(xla::ffi::DataType dtype, const Dims& dims) {
  std::string result;
  for (int64_t dim : dims) result += (result.empty() ? "" : ", ") + std::to_string(dim);
  return dtype_name(dtype) + " [" + result + "]";
}
inline std::string describe(const Array& array) { return describe(array.dtype, array.dims); }

// Reads operands and results in the order of the custom call. Every axis must be 1 to 2^31 - 1.
// `status()` keeps the first mismatch, after which the arrays that were read must not be used.
class ArrayReader {
 public:
  ArrayReader(const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results)
      : operands_(operands), results_(results) {}

  Array operand(const char* name) {
    if (next_operand_ >= operands_.size()) return missing(name);
    return read(name, *operands_.get<xla::ffi::AnyBuffer>(next_operand_++));
  }

  Array result(const char* name) {
    if (next_result_ >= results_.size()) return missing(name);
    return read(name, **results_.get<xla::ffi::AnyBuffer>(next_result_++));
  }

  Array operand(const char* name, xla::ffi::DataType dtype, const Dims& dims) {
    return checked(name, operand(name), dtype, dims);
  }

  Array result(const char* name, xla::ffi::DataType dtype, const Dims& dims) {
    return checked(name, result(name), dtype, dims);
  }

  // The first mismatch, or a wrong number of arrays. Call it once all are read.
  const Status& status() {
    if (next_operand_ < operands_.size() || next_result_ < results_.size()) {
      fail("expected " + std::to_string(next_operand_) + " operands and " +
           std::to_string(next_result_) + " results, got " + std::to_string(operands_.size()) +
           " and " + std::to_string(results_.size()));
    }
    return status_;
  }

  void fail(const std::string& sentence) {
    if (status_.ok()) status_ = {Code::kWrongCall, sentence};
  }
  void fail(const char* name, const std::string& expected, const std::string& got) {
    fail(std::string(name) + ": expected " + expected + ", got " + got);
  }

  // The product of extents, as an int64.
  int64_t product(const char* name, std::initializer_list<int64_t> extents) {
    int64_t result = 1;
    for (int64_t extent : extents) {
      if (__builtin_mul_overflow(result, extent, &result)) {
        fail(name, "fewer than 2^63 elements", "more");
        return 0;
      }
    }
    return result;
  }

  // The product of extents as a stride, which AITER takes as an int32.
  int32_t stride(const char* name, std::initializer_list<int64_t> extents) {
    const int64_t result = product(name, extents);
    if (result > kMostInt32) {
      fail(name,
           "a stride of at most " + std::to_string(kMostInt32) +
               " elements, as AITER's strides are int32",
           std::to_string(result));
      return 0;
    }
    return static_cast<int32_t>(result);
  }

 private:
  Array read(const char* name, const xla::ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    Array array{buffer.untyped_data(), Dims(dims.begin(), dims.end()), buffer.element_type(), 0};
    // size_bytes() would multiply extents without checking for overflow.
    size_t bytes = xla::ffi::ByteWidth(array.dtype);
    for (int64_t dim : array.dims) {
      if (dim < 1 || dim > kMostInt32 || __builtin_mul_overflow(bytes, dim, &bytes) ||
          bytes > size_t{INT64_MAX}) {
        fail(name, "axes of 1 to " + std::to_string(kMostInt32) + " and fewer than 2^63 bytes",
             describe(array));
        return array;
      }
    }
    array.bytes = bytes;
    ATTN_DISPATCH_NOTE_BUFFER(array.data, static_cast<int64_t>(array.bytes));
    return array;
  }

  Array checked(const char* name, Array array, xla::ffi::DataType dtype, const Dims& dims) {
    if (array.dtype != dtype || array.dims != dims)
      fail(name, describe(dtype, dims), describe(array));
    return array;
  }

  Array missing(const char* name) {
    fail(name, "an array", "none: the call has no more");
    return {};
  }

  const xla::ffi::RemainingArgs& operands_;
  const xla::ffi::RemainingRets& results_;
  size_t next_operand_ = 0;
  size_t next_result_ = 0;
  Status status_;
};

}  // namespace attn_dispatch
