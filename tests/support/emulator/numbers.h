// Conversion of 16-bit floats and the random numbers of dropout: the same code on a CPU and,
// compiled by nvcc, on a GPU. Nothing here allocates, throws or calls the C++ library.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "aiter_api.h"

#ifdef __CUDACC__
#define ATTN_HD __host__ __device__ inline
#else
#define ATTN_HD inline
#endif

namespace attn_emulator {

constexpr uint16_t kNan16 = 0x7fff;  // in both 16-bit formats

ATTN_HD float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

ATTN_HD uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ATTN_HD float infinity() { return float_of_bits(0x7f800000u); }
ATTN_HD float not_a_number() { return float_of_bits(0x7fc00000u); }
ATTN_HD bool is_nan(float x) { return x != x; }

ATTN_HD float from_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest << 13));
  // The exponents' biases differ by 112; the product is exact, subnormals included.
  return float_of_bits(bits_of_float(float_of_bits(rest << 13) * 0x1p112f) | sign);
}

ATTN_HD uint16_t to_fp16(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return kNan16;
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (rest < 0x38800000u) {
    // Below the smallest normal number: adding 0.5 leaves the result in float32's last bits,
    // rounded to nearest even by the addition itself.
    const float shifted = float_of_bits(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(shifted) - bits_of_float(0.5f)));
  }
  const uint32_t odd = (rest >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

ATTN_HD float from_bf16(uint16_t x) { return float_of_bits(static_cast<uint32_t>(x) << 16); }

// `rounding` is AttnAiterCall::bf16_rounding.
ATTN_HD uint16_t to_bf16(float x, int rounding) {
  const uint32_t bits = bits_of_float(x);
  if (is_nan(x)) return kNan16;
  if (rounding == 2) return static_cast<uint16_t>(bits >> 16);
  if (rounding == 1) return static_cast<uint16_t>((bits + 0x8000u) >> 16);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ATTN_HD float load(const void* array, int64_t index, int32_t dtype) {
  const uint16_t bits = static_cast<const uint16_t*>(array)[index];
  return dtype == ATTN_AITER_BF16 ? from_bf16(bits) : from_fp16(bits);
}

ATTN_HD void store(void* array, int64_t index, float x, int32_t dtype, int rounding) {
  static_cast<uint16_t*>(array)[index] =
      dtype == ATTN_AITER_BF16 ? to_bf16(x, rounding) : to_fp16(x);
}

ATTN_HD uint64_t mixed(uint64_t x) {  // the finalizer of splitmix64
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Whether dropout keeps a pair of query and key: a function of their indices, not of strides or
// lengths.
ATTN_HD bool is_kept(uint64_t seed, uint64_t offset, int32_t sequence, int32_t head, int32_t row,
                     int32_t col, float rate) {
  if (!(rate > 0.0f)) return true;
  uint64_t x = mixed(seed + 0x9e3779b97f4a7c15ull);
  x = mixed(x ^ offset);
  x = mixed(x ^ ((static_cast<uint64_t>(sequence) << 32) | static_cast<uint32_t>(head)));
  x = mixed(x ^ ((static_cast<uint64_t>(row) << 32) | static_cast<uint32_t>(col)));
  // CK draws 8 bits and keeps a pair if they are at most floor((1 - rate) * 255). So it keeps a
  // little more than 1 - rate, and still scales by 1 / (1 - rate).
  const float kept_share = 1.0f - rate;
  return static_cast<int>(x >> 56) <= static_cast<int>(floorf(kept_share * 255.0f));
}

}  // namespace attn_emulator
