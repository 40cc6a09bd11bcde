// Vector instructions on integers and bits.
#include "lanes.h"
#include "ops.h"

namespace cdna {
namespace {

template <auto F>
constexpr auto bits = vector<u32, F>;

// Four bytes of `high` and `low`: bytes 0 to 7, signs of half words 8 to 11, 12 is 0, more are 255.
u32 permute_bytes(u32 high, u32 low, u32 selectors) {
  const u64 both = u64{high} << 32 | low;
  u32 out = 0;
  for (int n = 0; n < 4; ++n) {
    const u32 selector = selectors >> 8 * n & 255;
    u32 byte = selector == 12 ? 0 : 255;
    if (selector < 8) byte = both >> 8 * selector & 255;
    if (selector >= 8 && selector < 12) byte = both >> (16 * (selector - 8) + 15) & 1 ? 255 : 0;
    out |= byte << 8 * n;
  }
  return out;
}

constexpr u32 multiply_24(u32 a, u32 b) { return u32(i32(a << 8) >> 8) * u32(i32(b << 8) >> 8); }

constexpr Op kOps[] = {
    {"v_add_u32", bits<[](u32 a, u32 b) { return a + b; }>},
    {"v_add_i32", bits<[](u32 a, u32 b) { return a + b; }>},
    {"v_sub_u32", bits<[](u32 a, u32 b) { return a - b; }>},
    {"v_sub_i32", bits<[](u32 a, u32 b) { return a - b; }>},
    {"v_subrev_u32", bits<[](u32 a, u32 b) { return b - a; }>},
    {"v_add3_u32", bits<[](u32 a, u32 b, u32 c) { return a + b + c; }>},
    {"v_mul_i32_i24", bits<[](u32 a, u32 b) { return multiply_24(a, b); }>},
    {"v_mul_lo_u32", bits<[](u32 a, u32 b) { return a * b; }>},
    {"v_mul_hi_u32", bits<[](u32 a, u32 b) { return u32(u64{a} * b >> 32); }>},
    {"v_and_b32", bits<[](u32 a, u32 b) { return a & b; }>},
    {"v_xor_b32", bits<[](u32 a, u32 b) { return a ^ b; }>},
    {"v_and_or_b32", bits<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>},
    {"v_lshlrev_b32", bits<[](u32 a, u32 b) { return b << (a & 31); }>},
    {"v_lshrrev_b32", bits<[](u32 a, u32 b) { return (b >> (a & 31)); }>},
    {"v_bfe_u32",
     bits<[](u32 a, u32 b, u32 c) { return (a >> (b & 31)) & ((u32{1} << (c & 31)) - 1); }>},
    {"v_perm_b32", bits<permute_bytes>},
    {"v_cmp_eq_u32", compare<u32, [](u32 a, u32 b) { return a == b; }>},
    {"v_cmp_lt_u32", compare<u32, [](u32 a, u32 b) { return a < b; }>},
    {"v_cmp_le_u32", compare<u32, [](u32 a, u32 b) { return a <= b; }>},
    {"v_cmp_lt_i32", compare<i32, [](i32 a, i32 b) { return a < b; }>},
    {"v_cmp_gt_i32", compare<i32, [](i32 a, i32 b) { return (a > b); }>},
    {"v_cmp_ge_i32", compare<i32, [](i32 a, i32 b) { return (a >= b); }>},
};

}  // namespace

Ops integer_ops() { return kOps; }

}  // namespace cdna
