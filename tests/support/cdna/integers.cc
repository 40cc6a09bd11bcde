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

constexpr u32 unsigned_24(u32 x) { return x & 0xffffff; }

constexpr u32 reversed(u32 x) {
  u32 out = 0;
  for (int n = 0; n < 32; ++n) out |= (x >> n & 1) << (31 - n);
  return out;
}

// The field of `size` bits from `start` on, with its sign.
constexpr u32 signed_field(u32 x, u32 start, u32 size) {
  size &= 31;
  if (!size) return 0;
  const u32 left = x >> (start & 31) << (32 - size);
  return u32(i32(left) >> (32 - size));
}

// Adds the number of a mask's bits below the lane: of its first 32 bits, or of its last.
template <int first>
void count_below(Wave& w, const Instruction& i) {
  Lanes mask(w, i, 1), sum(w, i, 2);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int bits = std::clamp(l - first, 0, 32);
    const u32 below = u32((u64{1} << bits) - 1);
    out[l] = sum.get<u32>(l) + u32(std::popcount(mask.get<u32>(l) & below));
  }
  w.put(i.operands[0].index, out, w.exec());
}

// Operands: a sum of 64 bits, its carries, two factors, and a number of 64 bits.
void multiply_add_64(Wave& w, const Instruction& i) {
  Lanes a(w, i, 2), b(w, i, 3), low(w, i, 4);
  const bool is_register = i.operands[4].kind != kConstant;
  Lanes high(w, i, 4, is_register ? 1 : 0);
  u32 out[2][kLanes];
  u64 carries = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 added = low.get<u32>(l) | (is_register ? u64{high.get<u32>(l)} << 32 : 0);
    const u64 sum = u64{a.get<u32>(l)} * b.get<u32>(l) + added;
    out[0][l] = u32(sum), out[1][l] = u32(sum >> 32);
    carries |= u64{sum < added} << l;
  }
  for (int n = 0; n < 2; ++n) w.put(i.operands[0].index + n, out[n], w.exec());
  w.set_pair(i.operands[1].index, carries & w.exec());
}

// Operands: the sum, the mask of carries, two numbers and, if `takes_carry`, a mask.
template <bool takes_carry>
void add_with_carry(Wave& w, const Instruction& i) {
  Lanes a(w, i, 2), b(w, i, 3);
  const u64 carries = takes_carry ? w.pair(i.operands[4].index) : 0;
  u32 out[kLanes];
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 sum = u64{a.get<u32>(l)} + b.get<u32>(l) + (carries >> l & 1);
    out[l] = u32(sum);
    mask |= sum >> 32 << l;
  }
  w.put(i.operands[0].index, out, w.exec());
  w.set_pair(i.operands[1].index, mask & w.exec());
}

void compare_le_u64(Wave& w, const Instruction& i) {
  Lanes low_a(w, i, 1), high_a(w, i, 1, 1), low_b(w, i, 2), high_b(w, i, 2, 1);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 a = low_a.get<u32>(l) | u64{high_a.get<u32>(l)} << 32;
    const u64 b = low_b.get<u32>(l) | u64{high_b.get<u32>(l)} << 32;
    mask |= u64{a <= b} << l;
  }
  w.set_pair(i.operands[0].index, mask & w.exec());
}

constexpr Op kOps[] = {
    {"v_add_co_u32", add_with_carry<false>},
    {"v_addc_co_u32", add_with_carry<true>},
    {"v_cmp_le_u64", compare_le_u64},
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
    {"v_or_b32", bits<[](u32 a, u32 b) { return a | b; }>},
    {"v_mad_u64_u32", multiply_add_64},
    {"v_mbcnt_lo_u32_b32", count_below<0>},
    {"v_mbcnt_hi_u32_b32", count_below<32>},
    {"v_bfrev_b32", bits<reversed>},
    {"v_bfe_i32", bits<signed_field>},
    {"v_mul_u32_u24", bits<[](u32 a, u32 b) { return unsigned_24(a) * unsigned_24(b); }>},
    {"v_mad_u32_u24",
     bits<[](u32 a, u32 b, u32 c) { return unsigned_24(a) * unsigned_24(b) + c; }>},
    {"v_mad_i32_i24", bits<[](u32 a, u32 b, u32 c) { return multiply_24(a, b) + c; }>},
    {"v_lshl_add_u32", bits<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>},
    {"v_add_lshl_u32", bits<[](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>},
    {"v_lshl_or_b32", bits<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) | c; }>},
    {"v_cmpx_le_u32", compare<u32, [](u32 a, u32 b) { return a <= b; }>},
    {"v_xor_b32", bits<[](u32 a, u32 b) { return a ^ b; }>},
    {"v_and_or_b32", bits<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>},
    {"v_lshlrev_b32", bits<[](u32 a, u32 b) { return b << (a & 31); }>},
    {"v_lshrrev_b32", bits<[](u32 a, u32 b) { return (b >> (a & 31)); }>},
    {"v_ashrrev_i32", bits<[](u32 a, u32 b) { return u32((i32(b) >> (a & 31))); }>},
    // Results of 16 bits have zeros above.
    {"v_lshrrev_b16", bits<[](u32 a, u32 b) { return (u32{u16(b)} >> (a & 15)); }>},
    {"v_ashrrev_i16", bits<[](u32 a, u32 b) { return u32{u16((int16_t(b) >> (a & 15)))}; }>},
    {"v_add_u16", bits<[](u32 a, u32 b) { return u32{u16(a + b)}; }>},
    {"v_sub_u16", bits<[](u32 a, u32 b) { return u32{u16(a - b)}; }>},
    {"v_or3_b32", bits<[](u32 a, u32 b, u32 c) { return a | b | c; }>},
    {"v_bfe_u32",
     bits<[](u32 a, u32 b, u32 c) { return (a >> (b & 31)) & ((u32{1} << (c & 31)) - 1); }>},
    {"v_perm_b32", bits<permute_bytes>},
    {"v_cmp_eq_u32", compare<u32, [](u32 a, u32 b) { return a == b; }>},
    {"v_cmp_ne_u32", compare<u32, [](u32 a, u32 b) { return a != b; }>},
    {"v_cmp_lt_u32", compare<u32, [](u32 a, u32 b) { return a < b; }>},
    {"v_cmp_le_u32", compare<u32, [](u32 a, u32 b) { return a <= b; }>},
    {"v_cmp_lt_i32", compare<i32, [](i32 a, i32 b) { return a < b; }>},
    {"v_cmp_le_i32", compare<i32, [](i32 a, i32 b) { return a <= b; }>},
    {"v_cmp_gt_i32", compare<i32, [](i32 a, i32 b) { return (a > b); }>},
    {"v_cmp_ge_i32", compare<i32, [](i32 a, i32 b) { return (a >= b); }>},
};

}  // namespace

Ops integer_ops() { return kOps; }

}  // namespace cdna
