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

// Adds to the destination.
void fused_onto(Wave& w, const Instruction& i) {
  Instruction three = i;
  three.operands[3] = i.operands[0];
  vector<float, fused>(w, three);
}

double double_of(const Lanes& low, const Lanes& high, int l) {
  return std::bit_cast<double>(low.get<u32>(l) | u64{high.get<u32>(l)} << 32);
}

void put_double(Wave& w, const Operand& o, const double* x) {
  for (int n = 0; n < 2; ++n) {
    u32 out[kLanes];
    for (int l = 0; l < kLanes; ++l) out[l] = u32(std::bit_cast<u64>(x[l]) >> 32 * n);
    w.put(o.index + n, out, w.exec());
  }
}

void to_double(Wave& w, const Instruction& i) {
  Lanes a(w, i, 1);
  a.flush_if<float>(w.flushes_denormals);
  double out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = a.get<float>(l);
  put_double(w, i.operands[0], out);
}

void from_double(Wave& w, const Instruction& i) {
  Lanes low(w, i, 1), high(w, i, 1, 1);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    out[l] = to_bits(float(double_of(low, high, l)));
    if (w.flushes_denormals) out[l] = flushed(out[l]);
  }
  w.put(i.operands[0].index, out, w.exec());
}

void fused_onto_double(Wave& w, const Instruction& i) {
  Lanes low_a(w, i, 1), high_a(w, i, 1, 1), low_b(w, i, 2), high_b(w, i, 2, 1);
  Lanes low(w, i, 0), high(w, i, 0, 1);
  double out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    out[l] =
        std::fma(double_of(low_a, high_a, l), double_of(low_b, high_b, l), double_of(low, high, l));
  }
  put_double(w, i.operands[0], out);
}

// A quotient is made by v_div_scale, v_rcp, steps of Newton's, v_div_fmas and v_div_fixup. Only
// quotients of numbers that need no scaling are modelled.
bool needs_scaling(float divisor, float dividend) {
  const int d = std::ilogb(divisor), n = std::ilogb(dividend);
  return d < -100 || d > 100 || n < -100 || n - d > 90 || n - d < -100;
}

// Operands: the scaled number, the mask of what was scaled, itself, the divisor, the dividend.
void scale_for_quotient(Wave& w, const Instruction& i) {
  Lanes a(w, i, 2), divisor(w, i, 3), dividend(w, i, 4);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const float d = divisor.get<float>(l), n = dividend.get<float>(l);
    const bool is_number = std::isfinite(d) && std::isfinite(n) && d != 0 && n != 0;
    if (w.exec() >> l & 1 && is_number && needs_scaling(d, n)) {
      throw Fault("a quotient of numbers that v_div_scale_f32 scales");
    }
    out[l] = d == 0 || n == 0 ? 0x7fc00000 : a.get<u32>(l);
  }
  w.put(i.operands[0].index, out, w.exec());
  w.set_pair(i.operands[1].index, 0);
}

void finish_quotient(Wave& w, const Instruction& i) {
  if (w.pair(kVcc) & w.exec()) throw Fault("v_div_fmas_f32 of a scaled number");
  vector<float, fused>(w, i);
}

// The quotient, or what it is where one of both numbers is none, 0 or infinite.
float mended_quotient(float quotient, float divisor, float dividend) {
  if (std::isnan(dividend)) return dividend;
  if (std::isnan(divisor)) return divisor;
  const bool is_negative = std::signbit(divisor) != std::signbit(dividend);
  if ((divisor == 0 && dividend == 0) || (std::isinf(divisor) && std::isinf(dividend))) {
    return to_float(0xffc00000);
  }
  float size = std::fabs(quotient);
  if (divisor == 0 || std::isinf(dividend)) size = to_float(0x7f800000);
  if (dividend == 0 || std::isinf(divisor)) size = 0;
  return is_negative ? -size : size;
}

// Two registers of each source. op_sel says which of them the first result takes, and op_sel_hi
// which the second; neg_lo and neg_hi change signs.
template <auto F>
void packed(Wave& w, const Instruction& i) {
  u32 out[2][kLanes];
  for (int part = 0; part < 2; ++part) {
    int parts[3];
    Instruction one = i;
    for (int n = 0; n < 3; ++n) {
      parts[n] = i.immediate >> (4 * part + n) & 1;
      one.operands[1 + n].negate ^= i.immediate >> (8 + 4 * part + n) & 1;
    }
    each_lane<float, F>(w, one, parts, out[part]);
  }
  for (int part = 0; part < 2; ++part) w.put(i.operands[0].index + part, out[part], w.exec());
}

constexpr Op kOps[] = {
    {"v_add_f32", floats<[](float a, float b) { return a + b; }>},
    {"v_sub_f32", floats<[](float a, float b) { return a - b; }>},
    {"v_subrev_f32", floats<[](float a, float b) { return b - a; }>},
    {"v_mul_f32", floats<[](float a, float b) { return a * b; }>},
    {"v_fma_f32", floats<fused>},
    {"v_fmac_f32", fused_onto},
    {"v_fmamk_f32", floats<fused>},
    {"v_cvt_f64_f32", to_double},
    {"v_cvt_f32_f64", from_double},
    {"v_fmac_f64", fused_onto_double},
    {"v_div_scale_f32", scale_for_quotient},
    {"v_div_fmas_f32", finish_quotient},
    {"v_div_fixup_f32", floats<mended_quotient>},
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
    {"v_cvt_f32_f16", vector<u32, [](u32 a) { return from_f16(u16(a)); }>},
    {"v_cvt_f32_bf16", vector<u32, [](u32 a) { return from_bf16(u16(a)); }>},
    {"v_cmp_lt_f32", compare<float, [](float a, float b) { return a < b; }>},
    {"v_cmp_ge_f32", compare<float, [](float a, float b) { return (a >= b); }>},
    {"v_cmp_u_f32",
     compare<float, [](float a, float b) { return std::isnan(a) || std::isnan(b); }>},
};

}  // namespace

Ops float_ops() { return kOps; }

}  // namespace cdna
