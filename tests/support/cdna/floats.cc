// Vector instructions on float32, and conversions.
//
// Rounding is to nearest even. The MODE register's IEEE bit is 0: the larger of NaN and x is x.
#include <limits>

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

u32 to_signed(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.f) return 0x7fffffff;
  return x < -2147483648.f ? 0x80000000 : u32(i32(x));
}

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
template <auto Fused>
void fused_onto(Wave& w, const Instruction& i) {
  Instruction three = i;
  three.operands[3] = i.operands[0];
  Fused(w, three);
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

// A float64 source: two registers, or a constant that is written as a float32 number.
struct Doubles {
  double x[kLanes];
  Doubles(const Wave& w, Instruction i, int n) {
    const Operand o = i.operands[n];
    i.operands[n].negate = i.operands[n].absolute = 0;  // signs are in the second register alone
    Lanes low(w, i, n), high(w, i, n, 1);
    for (int l = 0; l < kLanes; ++l) {
      x[l] = o.kind == kConstant ? to_float(u32(o.index)) : double_of(low, high, l);
      if (o.absolute) x[l] = std::fabs(x[l]);
      if (o.negate) x[l] = -x[l];
    }
  }
};

template <auto F>
void doubles(Wave& w, const Instruction& i) {
  constexpr int n = arity<double, F>;
  const Doubles a(w, i, 1), b(w, i, n > 1 ? 2 : 1), c(w, i, n > 2 ? 3 : 1);
  double out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if constexpr (n == 1) out[l] = F(a.x[l]);
    if constexpr (n == 2) out[l] = F(a.x[l], b.x[l]);
    if constexpr (n == 3) out[l] = F(a.x[l], b.x[l], c.x[l]);
  }
  put_double(w, i.operands[0], out);
}

double fused_doubles(double a, double b, double c) { return std::fma(a, b, c); }

// A quotient is made by v_div_scale, v_rcp, steps of Newton's, v_div_fmas and v_div_fixup. Only
// quotients of numbers that need no scaling are modelled, which is what all float32 numbers are as
// float64.
void check_scale(double divisor, double dividend, int most) {
  if (!std::isfinite(divisor) || !std::isfinite(dividend) || divisor == 0 || dividend == 0) return;
  const int d = std::ilogb(divisor), n = std::ilogb(dividend);
  if (d < -most || d > most || n < -most || n - d > most - 10 || n - d < -most) {
    throw Fault("a quotient of numbers that v_div_scale scales");
  }
}

// Operands: the scaled number, the mask of what was scaled, itself, the divisor, the dividend.
void scale_for_quotient(Wave& w, const Instruction& i) {
  Lanes a(w, i, 2), divisor(w, i, 3), dividend(w, i, 4);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const float d = divisor.get<float>(l), n = dividend.get<float>(l);
    if (w.exec() >> l & 1) check_scale(d, n, 100);
    out[l] = d == 0 || n == 0 ? 0x7fc00000 : a.get<u32>(l);
  }
  w.put(i.operands[0].index, out, w.exec());
  w.set_pair(i.operands[1].index, 0);
}

void scale_for_quotient_of_doubles(Wave& w, const Instruction& i) {
  const Doubles a(w, i, 2), divisor(w, i, 3), dividend(w, i, 4);
  double out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const double d = divisor.x[l], n = dividend.x[l];
    if (w.exec() >> l & 1) check_scale(d, n, 700);
    out[l] = d == 0 || n == 0 ? std::numeric_limits<double>::quiet_NaN() : a.x[l];
  }
  put_double(w, i.operands[0], out);
  w.set_pair(i.operands[1].index, 0);
}

template <auto Fused>
void finish_quotient(Wave& w, const Instruction& i) {
  if (w.pair(kVcc) & w.exec()) throw Fault("v_div_fmas of a scaled number");
  Fused(w, i);
}

// The quotient, or what it is where one of both numbers is none, 0 or infinite.
template <typename T>
T mended_quotient(T quotient, T divisor, T dividend) {
  if (std::isnan(dividend)) return dividend;
  if (std::isnan(divisor)) return divisor;
  const bool is_negative = std::signbit(divisor) != std::signbit(dividend);
  if ((divisor == 0 && dividend == 0) || (std::isinf(divisor) && std::isinf(dividend))) {
    return -std::numeric_limits<T>::quiet_NaN();
  }
  T size = std::fabs(quotient);
  if (divisor == 0 || std::isinf(dividend)) size = std::numeric_limits<T>::infinity();
  if (dividend == 0 || std::isinf(divisor)) size = 0;
  return is_negative ? -size : size;
}

// Multiplies by a power of two, whose exponent is a whole number.
void scale_by_exponent(Wave& w, const Instruction& i) {
  Lanes a(w, i, 1), exponent(w, i, 2);
  a.flush_if<float>(w.flushes_denormals);
  u32 out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    out[l] = to_bits(std::ldexp(a.get<float>(l), std::clamp(exponent.get<i32>(l), -999, 999)));
    if (w.flushes_denormals) out[l] = flushed(out[l]);
  }
  w.put(i.operands[0].index, out, w.exec());
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
    {"v_fmac_f32", fused_onto<floats<fused>>},
    {"v_fmamk_f32", floats<fused>},
    {"v_cvt_f64_f32", to_double},
    {"v_cvt_f32_f64", from_double},
    {"v_add_f64", doubles<[](double a, double b) { return a + b; }>},
    {"v_mul_f64", doubles<[](double a, double b) { return a * b; }>},
    {"v_fma_f64", doubles<fused_doubles>},
    {"v_fmac_f64", fused_onto<doubles<fused_doubles>>},
    {"v_rcp_f64", doubles<[](double a) { return 1 / a; }>, kTranscendental},
    {"v_div_scale_f32", scale_for_quotient},
    {"v_div_scale_f64", scale_for_quotient_of_doubles},
    {"v_div_fmas_f32", finish_quotient<floats<fused>>},
    {"v_div_fmas_f64", finish_quotient<doubles<fused_doubles>>},
    {"v_div_fixup_f32", floats<mended_quotient<float>>},
    {"v_div_fixup_f64", doubles<mended_quotient<double>>},
    {"v_ldexp_f32", scale_by_exponent},
    {"v_trunc_f32", floats<[](float a) { return std::trunc(a); }>},
    {"v_rndne_f32", floats<[](float a) { return std::nearbyint(a); }>},
    {"v_max_f32", floats<larger>},
    {"v_max3_f32", floats<[](float a, float b, float c) { return larger(larger(a, b), c); }>},
    {"v_exp_f32", floats<[](float a) { return std::exp2(a); }>, kTranscendental},
    {"v_log_f32", floats<[](float a) { return std::log2(a); }>, kTranscendental},
    {"v_rcp_f32", floats<[](float a) { return 1.f / a; }>, kTranscendental},
    {"v_rcp_iflag_f32", floats<[](float a) { return 1.f / a; }>, kTranscendental},
    {"v_cvt_f32_u32", vector<u32, [](u32 a) { return to_bits(float(a)); }>},
    {"v_cvt_u32_f32", floats<to_integer>},
    {"v_cvt_i32_f32", floats<to_signed>},
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
    {"v_cmp_ngt_f32", compare<float, [](float a, float b) { return !(a > b); }>},
    {"v_cmp_nlt_f32", compare<float, [](float a, float b) { return !(a < b); }>},
    {"v_cmp_neq_f32", compare<float, [](float a, float b) { return a != b; }>},
    {"v_cmp_ge_f32", compare<float, [](float a, float b) { return (a >= b); }>},
    {"v_cmp_u_f32",
     compare<float, [](float a, float b) { return std::isnan(a) || std::isnan(b); }>},
};

}  // namespace

Ops float_ops() { return kOps; }

}  // namespace cdna
