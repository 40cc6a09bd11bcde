// Arithmetic on scalar registers. SCC is a carry, an overflow, "not zero" or a comparison.
#include "ops.h"

namespace cdna {
namespace {

template <auto F>
void with_scc(Wave& w, const Instruction& i) {
  w.s[i.operands[0].index] = F(w.scalar(i.operands[1]), w.scalar(i.operands[2]), w.scc);
}

template <auto F>
void not_zero(Wave& w, const Instruction& i) {
  const u32 x = F(w.scalar(i.operands[1]), w.scalar(i.operands[2]));
  w.s[i.operands[0].index] = x;
  w.scc = x != 0;
}

template <auto F>
void plain(Wave& w, const Instruction& i) {
  w.s[i.operands[0].index] = F(w.scalar(i.operands[1]), w.scalar(i.operands[2]));
}

template <typename T, auto F>
void compare(Wave& w, const Instruction& i) {
  w.scc = F(T(w.scalar(i.operands[0])), T(w.scalar(i.operands[1])));
}

u32 add_signed(u32 a, u32 b, bool& overflow) {
  overflow = (~(a ^ b) & (a ^ (a + b))) >> 31;
  return a + b;
}

void move_32(Wave& w, const Instruction& i) { w.s[i.operands[0].index] = w.scalar(i.operands[1]); }

void move_64(Wave& w, const Instruction& i) {
  w.set_pair(i.operands[0].index, w.scalar_64(i.operands[1]));
}

template <auto F>
void not_zero_64(Wave& w, const Instruction& i) {
  const u64 x = F(w.scalar_64(i.operands[1]), w.scalar_64(i.operands[2]));
  w.set_pair(i.operands[0].index, x);
  w.scc = x != 0;
}

// The shift is a number of 32 bits.
void shift_left_64(Wave& w, const Instruction& i) {
  const u64 x = w.scalar_64(i.operands[1]) << (w.scalar(i.operands[2]) & 63);
  w.set_pair(i.operands[0].index, x);
  w.scc = x != 0;
}

void absolute(Wave& w, const Instruction& i) {
  const u32 x = w.scalar(i.operands[1]);
  w.s[i.operands[0].index] = x >> 31 ? 0 - x : x;
  w.scc = x != 0;
}

i32 constant_of_16_bits(const Instruction& i) { return i32{int16_t(i.operands[1].index)}; }

void move_16_bits(Wave& w, const Instruction& i) {
  w.s[i.operands[0].index] = u32(constant_of_16_bits(i));
}

void multiply_16_bits(Wave& w, const Instruction& i) {
  w.s[i.operands[0].index] *= u32(constant_of_16_bits(i));
}

void complement(Wave& w, const Instruction& i) {
  const u32 x = ~w.scalar(i.operands[1]);
  w.s[i.operands[0].index] = x;
  w.scc = x != 0;
}

// Keeps EXEC in the destination and replaces it by F of the source and itself.
template <auto F>
void replace_exec(Wave& w, const Instruction& i) {
  const u64 before = w.exec(), after = F(w.scalar_64(i.operands[1]), before);
  w.set_pair(i.operands[0].index, before);
  w.set_pair(kExec, after);
  w.scc = after != 0;
}

// The address of the next instruction, which the decoder knows.
void program_counter(Wave& w, const Instruction& i) {
  const Operand& at = i.operands[1];
  w.set_pair(i.operands[0].index, u32(at.index) | u64{u32(at.width)} << 32);
}

// Two bits of MODE: whether float32 numbers that are denormal stay, as operands and as results.
void set_denormals(Wave& w, const Instruction& i) {
  if (i.immediate < 0) return;  // float64 numbers are rounded to the nearest, as they are here
  if (i.immediate != 0 && i.immediate != 3) throw Fault("denormals that are flushed on one side");
  w.flushes_denormals = i.immediate == 0;
}

void add_16_bits(Wave& w, const Instruction& i) {
  u32& x = w.s[i.operands[0].index];
  x = add_signed(x, u32(constant_of_16_bits(i)), w.scc);
}

constexpr auto equal = [](auto a, auto b) { return a == b; };
constexpr auto different = [](auto a, auto b) { return a != b; };
constexpr auto less = [](auto a, auto b) { return a < b; };
constexpr auto less_or_equal = [](auto a, auto b) { return a <= b; };
constexpr auto greater = [](auto a, auto b) { return a > b; };
constexpr auto greater_or_equal = [](auto a, auto b) { return a >= b; };

constexpr Op kOps[] = {
    {"s_mov_b32", move_32},
    {"s_mov_b64", move_64},
    {"s_add_u32", with_scc<[](u32 a, u32 b, bool& scc) {
       scc = ((u64{a} + b) >> 32);
       return a + b;
     }>},
    {"s_addc_u32", with_scc<[](u32 a, u32 b, bool& scc) {
       const u64 sum = u64{a} + b + scc;
       scc = (sum >> 32);
       return u32(sum);
     }>},
    {"s_sub_u32", with_scc<[](u32 a, u32 b, bool& scc) {
       scc = (b > a);
       return a - b;
     }>},
    {"s_add_i32", with_scc<add_signed>},
    {"s_sub_i32", with_scc<[](u32 a, u32 b, bool& scc) {
       scc = (((a ^ b) & (a ^ (a - b))) >> 31);
       return a - b;
     }>},
    {"s_addk_i32", add_16_bits},
    {"s_subb_u32", with_scc<[](u32 a, u32 b, bool& scc) {
       const u64 taken = u64{b} + scc;
       scc = (taken > a);
       return u32(a - taken);
     }>},
    {"s_movk_i32", move_16_bits},
    {"s_mulk_i32", multiply_16_bits},
    {"s_setreg_imm32_b32", set_denormals},
    {"s_abs_i32", absolute},
    {"s_max_i32", with_scc<[](u32 a, u32 b, bool& scc) {
       scc = i32(a) >= i32(b);
       return scc ? a : b;
     }>},
    {"s_min_i32", with_scc<[](u32 a, u32 b, bool& scc) {
       scc = i32(a) < i32(b);
       return scc ? a : b;
     }>},
    {"s_not_b32", complement},
    {"s_getpc_b64", program_counter},
    {"s_and_saveexec_b64", replace_exec<[](u64 a, u64 exec) { return a & exec; }>},
    {"s_andn2_saveexec_b64", replace_exec<[](u64 a, u64 exec) { return a & ~exec; }>},
    {"s_lshl_b64", shift_left_64},
    {"s_or_b64", not_zero_64<[](u64 a, u64 b) { return a | b; }>},
    {"s_xor_b64", not_zero_64<[](u64 a, u64 b) { return a ^ b; }>},
    {"s_andn2_b64", not_zero_64<[](u64 a, u64 b) { return a & ~b; }>},
    {"s_cselect_b64",
     [](Wave& w, const Instruction& i) {
       w.set_pair(i.operands[0].index, w.scalar_64(i.operands[w.scc ? 1 : 2]));
     }},
    {"s_and_b64", not_zero_64<[](u64 a, u64 b) { return a & b; }>},
    {"s_mul_hi_i32", plain<[](u32 a, u32 b) { return u32(i64{i32(a)} * i32(b) >> 32); }>},
    {"s_mul_hi_u32", plain<[](u32 a, u32 b) { return u32(u64{a} * b >> 32); }>},
    {"s_mul_i32", plain<[](u32 a, u32 b) { return a * b; }>},
    {"s_and_b32", not_zero<[](u32 a, u32 b) { return a & b; }>},
    {"s_andn2_b32", not_zero<[](u32 a, u32 b) { return a & ~b; }>},
    {"s_or_b32", not_zero<[](u32 a, u32 b) { return a | b; }>},
    {"s_xor_b32", not_zero<[](u32 a, u32 b) { return a ^ b; }>},
    {"s_lshl_b32", not_zero<[](u32 a, u32 b) { return a << (b & 31); }>},
    {"s_lshr_b32", not_zero<[](u32 a, u32 b) { return (a >> (b & 31)); }>},
    {"s_ashr_i32", not_zero<[](u32 a, u32 b) { return u32(i32(a) >> (b & 31)); }>},
    {"s_cselect_b32", with_scc<[](u32 a, u32 b, bool& scc) { return scc ? a : b; }>},
    {"s_cmp_eq_i32", compare<i32, equal>},
    {"s_cmp_lt_i32", compare<i32, less>},
    {"s_cmp_le_i32", compare<i32, less_or_equal>},
    {"s_cmp_gt_i32", compare<i32, greater>},
    {"s_cmp_ge_i32", compare<i32, greater_or_equal>},
    {"s_cmp_eq_u32", compare<u32, equal>},
    {"s_cmp_lg_u32", compare<u32, different>},
    {"s_cmp_eq_u64",
     [](Wave& w, const Instruction& i) {
       w.scc = w.scalar_64(i.operands[0]) == w.scalar_64(i.operands[1]);
     }},
    {"s_cmp_lg_u64",
     [](Wave& w, const Instruction& i) {
       w.scc = w.scalar_64(i.operands[0]) != w.scalar_64(i.operands[1]);
     }},
    {"s_cmp_lt_u32", compare<u32, less>},
    {"s_cmp_gt_u32", compare<u32, greater>},
    {"s_cmp_le_u32", compare<u32, less_or_equal>},
    {"s_cmp_ge_u32", compare<u32, greater_or_equal>},
};

}  // namespace

Ops scalar_ops() { return kOps; }

}  // namespace cdna
