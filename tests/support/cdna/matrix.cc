// Matrix instructions: D = A·B + C, of M rows, M columns and K products. EXEC is ignored.
//
// Lane l holds A's row l % M, and B's column l % M, at k = per_lane·(l / M) and the next, two in a
// register. It holds column l % M of C and D; register r is row 4·groups·(r / 4) + 4·(l / M) + r
// % 4. Products are summed in float32 in the order of k; hardware's order is not documented.
#include <vector>

#include "ops.h"

namespace cdna {
namespace {

using Convert = float (*)(u16);

float from_f16_table(u16 x) {
  static const std::vector<float> table = [] {
    std::vector<float> all(65536);
    for (u32 i = 0; i < all.size(); ++i) all[i] = from_f16(u16(i));
    return all;
  }();
  return table[x];
}

template <int M, int K>
struct Shape {
  static constexpr int groups = kLanes / M, per_lane = K / groups, registers = M * M / kLanes;
  static int row(int r, int group) { return 4 * groups * (r / 4) + 4 * group + r % 4; }
};

template <int M, int K, Convert convert>
void unpack(const Wave& w, const Operand& o, float (&to)[K][M]) {
  constexpr int per_lane = Shape<M, K>::per_lane;
  for (int n = 0; n < per_lane; ++n) {
    const u32* row = w.v[o.index + n / 2];
    for (int l = 0; l < kLanes; ++l) {
      to[per_lane * (l / M) + n][l % M] = convert(u16(row[l] >> 16 * (n % 2)));
    }
  }
}

template <int M, int K, Convert convert>
void multiply(Wave& w, const Instruction& i) {
  using S = Shape<M, K>;
  alignas(64) static thread_local float a[K][M], b[K][M], d[M][M];
  unpack<M, K, convert>(w, i.operands[1], a);
  unpack<M, K, convert>(w, i.operands[2], b);
  const Operand& c = i.operands[3];
  for (int r = 0; r < S::registers; ++r) {
    for (int l = 0; l < kLanes; ++l) {
      const u32 x = c.kind == kVgpr ? w.v[c.index + r][l] : u32(c.index);
      d[S::row(r, l / M)][l % M] = to_float(x);
    }
  }
  for (int row = 0; row < M; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < M; ++column) d[row][column] += a[k][row] * b[k][column];
    }
  }
  for (int r = 0; r < S::registers; ++r) {
    u32* out = w.v[i.operands[0].index + r];
    for (int l = 0; l < kLanes; ++l) out[l] = to_bits(d[S::row(r, l / M)][l % M]);
  }
}

constexpr Op kOps[] = {
    {"v_mfma_f32_32x32x8_bf16", multiply<32, 8, from_bf16>, 32},
    {"v_mfma_f32_16x16x16_bf16", multiply<16, 16, from_bf16>, 16},
    {"v_mfma_f32_16x16x16_f16", multiply<16, 16, from_f16_table>, 16},
    {"v_mfma_f32_32x32x16_bf16", multiply<32, 16, from_bf16>, 32},
    {"v_mfma_f32_32x32x16_f16", multiply<32, 16, from_f16_table>, 32},
    {"v_mfma_f32_16x16x32_bf16", multiply<16, 32, from_bf16>, 16},
    {"v_mfma_f32_16x16x32_f16", multiply<16, 32, from_f16_table>, 16},
};

}  // namespace

Ops matrix_ops() { return kOps; }

}  // namespace cdna
