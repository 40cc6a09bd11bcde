// Vector instructions that move or choose numbers.
#include "lanes.h"
#include "ops.h"

namespace cdna {
namespace {

constexpr auto move = vector<u32, [](u32 a) { return a; }>;

void move_64(Wave& w, const Instruction& i) {
  const bool is_register = i.operands[1].kind != kConstant;
  Lanes low(w, i, 1), high(w, i, 1, is_register ? 1 : 0);
  u32 out[2][kLanes];
  for (int l = 0; l < kLanes; ++l) {
    out[0][l] = low.get<u32>(l);
    out[1][l] = is_register ? high.get<u32>(l) : u32(i32(out[0][l]) >> 31);
  }
  for (int n = 0; n < 2; ++n) w.put(i.operands[0].index + n, out[n], w.exec());
}

void select(Wave& w, const Instruction& i) {
  Lanes a(w, i, 1), b(w, i, 2);
  const u64 mask = w.pair(i.operands[3].index);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = mask >> l & 1 ? b.get<u32>(l) : a.get<u32>(l);
  w.put(i.operands[0].index, out, w.exec());
}

void first_lane(Wave& w, const Instruction& i) {
  const int first = w.exec() ? std::countr_zero(w.exec()) : 0;
  w.s[i.operands[0].index] = Lanes(w, i, 1).get<u32>(first);
}

// Swaps the odd rows of the first operand with the even rows of the second.
template <int row>
void swap_rows(Wave& w, const Instruction& i) {
  if (w.exec() != kAllLanes) throw Fault("v_permlane*_swap with inactive lanes");
  u32 *a = w.v[i.operands[0].index], *b = w.v[i.operands[1].index];
  for (int l = 0; l < kLanes; ++l) {
    if (l / row % 2) std::swap(a[l], b[l - row]);
  }
}

constexpr Op kOps[] = {
    {"v_mov_b32", move},
    {"v_mov_b64", move_64},
    {"v_accvgpr_mov_b32", move},
    {"v_accvgpr_read_b32", move},
    {"v_accvgpr_write_b32", move},
    {"v_cndmask_b32", select},
    {"v_readfirstlane_b32", first_lane},
    {"v_permlane16_swap_b32", swap_rows<16>},
    {"v_permlane32_swap_b32", swap_rows<32>},
};

}  // namespace

Ops lane_ops() { return kOps; }

}  // namespace cdna
