// Numbers of 16 and 32 bits and their bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace cdna {

using u8 = uint8_t;
using u16 = uint16_t;
using i32 = int32_t;
using u32 = uint32_t;
using i64 = int64_t;
using u64 = uint64_t;

inline float to_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 to_bits(float x) { return std::bit_cast<u32>(x); }
inline u32 to_bits(u32 x) { return x; }

// A denormal number becomes a zero of its sign.
inline u32 flushed(u32 bits) { return bits & 0x7f800000 ? bits : bits & 0x80000000; }

inline float from_bf16(u16 x) { return to_float(u32{x} << 16); }

inline u16 to_bf16(float x) {
  const u32 bits = to_bits(x);
  if (std::isnan(x)) return u16(bits >> 16 | 0x40);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

inline float from_f16(u16 x) {
  const u32 sign = u32(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
  if (exponent == 31) return to_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return to_float(sign | (exponent + 112) << 23 | fraction << 13);
  return to_float(to_bits(std::ldexp(float(fraction), -24)) | sign);
}

enum class Rounding { kNearestEven, kToZero };

inline u16 to_f16(float x, Rounding rounding) {
  const u32 bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  const bool to_zero = rounding == Rounding::kToZero;
  if (magnitude > 0x7f800000) return u16(sign | 0x7e00);
  if (magnitude == 0x7f800000) return u16(sign | 0x7c00);
  constexpr u32 two_to_16 = 0x47800000, smallest_normal = 0x38800000;
  if (magnitude >= two_to_16) return u16(sign | (to_zero ? 0x7bff : 0x7c00));
  const int exponent = std::max(int(magnitude >> 23) - 127, -14);
  double steps = double(to_float(magnitude)) / std::ldexp(1.0, exponent - 10);
  steps = to_zero ? std::trunc(steps) : std::nearbyint(steps);
  if (magnitude < smallest_normal) return u16(sign | u32(steps));
  const u32 exponent_bits = ((magnitude >> 23) - 112) << 10;
  return u16(sign | (exponent_bits + u32(steps) - 1024));  // may carry into the exponent
}

}  // namespace cdna
