// Vector instructions on float32, and conversions.
//
// Rounding is to nearest even. The MODE register's IEEE bit is 0: the larger of NaN and x is x.
#include "lanes.h"
#include "ops.h"

namespace cdna {
namespace {

template <auto F>
constexpr auto floats = vector<float, F>;

constexpr u32 kTranscendental = 16;  // cycles

float larger(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return to_float(to_bits(a) & to_bits(b));  // +0 is larger than -0
  return a > b ? a : b;
}

float fused(float a, float b, float c) { return std::fma(a, b, c); }

u32 to_integer(float x) {
  if (!(x > 0)) return 0;  // NaN too
  return x >= 4294967296.f ? ~u32{0} : u32(x);
}

template <auto F>
u32 both_halves(float a, float b) {
  return F(a) | u32{F(b)} << 16;
}
u16 nearest_f16(float x) { return to_f16(x, Rounding::kNearestEven); }
u16 truncated_f16(float x) { return to_f16(x, Rounding::kToZero); }

// Two registers of each source. op_sel says which of them the first result takes, and op_sel_hi
// which the second.
template <auto F>
void packed(Wave& w, const Instruction& i) {
  u32 out[2][kLanes];
  for (int part = 0; part < 2; ++part) {
    int parts[3];
    for (int n = 0; n < 3; ++n) parts[n] = i.immediate >> (4 * part + n) & 1;
    each_lane<float, F>(w, i, parts, out[part]);
  }
  for (int part = 0; part < 2; ++part) w.put(i.operands[0].index + part, out[part], w.exec());
}

constexpr Op kOps[] = {
    {"v_add_f32", floats<[](float a, float b) { return a + b; }>},
    {"v_sub_f32", floats<[](float a, float b) { return a - b; }>},
    {"v_subrev_f32", floats<[](float a, float b) { return b - a; }>},
    {"v_mul_f32", floats<[](float a, float b) { return a * b; }>},
    {"v_fma_f32", floats<fused>},
    {"v_max_f32", floats<larger>},
    {"v_max3_f32", floats<[](float a, float b, float c) { return larger(larger(a, b), c); }>},
    {"v_exp_f32", floats<[](float a) { return std::exp2(a); }>, kTranscendental},
    {"v_log_f32", floats<[](float a) { return std::log2(a); }>, kTranscendental},
    {"v_rcp_f32", floats<[](float a) { return 1.f / a; }>, kTranscendental},
    {"v_rcp_iflag_f32", floats<[](float a) { return 1.f / a; }>, kTranscendental},
    {"v_cvt_f32_u32", vector<u32, [](u32 a) { return to_bits(float(a)); }>},
    {"v_cvt_u32_f32", floats<to_integer>},
    {"v_cvt_pkrtz_f16_f32", floats<both_halves<truncated_f16>>},
    {"v_cvt_pk_f16_f32", floats<both_halves<nearest_f16>>},
    {"v_cvt_pk_bf16_f32", floats<both_halves<to_bf16>>},
    {"v_pk_mul_f32", packed<[](float a, float b) { return a * b; }>},
    {"v_pk_add_f32", packed<[](float a, float b) { return a + b; }>},
    {"v_pk_fma_f32", packed<fused>},
    {"v_cmp_eq_f32", compare<float, [](float a, float b) { return a == b; }>},
    {"v_cmp_u_f32",
     compare<float, [](float a, float b) { return std::isnan(a) || std::isnan(b); }>},
};

}  // namespace

Ops float_ops() { return kOps; }

}  // namespace cdna
