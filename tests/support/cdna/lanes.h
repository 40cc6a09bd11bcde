// Vector instructions as functions of one lane's numbers.
#pragma once

#include <type_traits>

#include "machine.h"

namespace cdna {

// A source operand in all lanes. `part` is its second register, of an operand of 64 bits.
class Lanes {
 public:
  Lanes(const Wave& w, const Instruction& i, int n, int part = 0) {
    const Operand& o = i.operands[n];
    if (o.kind == kVgpr) {
      x_ = w.v[o.index + part];
    } else {
      std::fill_n(own_, kLanes, o.kind == kSgpr ? w.s[o.index + part] : u32(o.index));
    }
    if (i.flags & kSelects) select(i.immediate >> 8 * (n - 1) & 255);
    if (n == 1 && i.flags & kQuadPerm) permute(w.exec(), i.immediate);
    if (o.absolute) change([](u32 x) { return x & 0x7fffffff; });
    if (o.negate) change([](u32 x) { return x ^ 0x80000000; });
  }
  Lanes(const Lanes&) = delete;

  template <typename T>
  T get(int lane) const {
    if constexpr (std::is_same_v<T, float>) return to_float(x_[lane]);
    return T(x_[lane]);
  }
  template <typename T>
  void flush_if(bool flushes) {
    if (std::is_same_v<T, float> && flushes) change(flushed);
  }
  u64 valid = kAllLanes;  // lanes whose source is an active lane

 private:
  template <typename F>
  void change(F f) {
    for (int l = 0; l < kLanes; ++l) own_[l] = f(x_[l]);
    x_ = own_;
  }
  // A part of the register, with its sign if bit 7 is on: byte 0 to 3, half word 4 or 5, or all, 6.
  void select(i32 which) {
    const i32 part = which & 7;
    if (part == 6) return;
    const int bits = part < 4 ? 8 : 16, start = part < 4 ? 8 * part : 16 * (part - 4);
    change([&](u32 x) {
      const i32 left = i32(x << (32 - start - bits));
      return which & 128 ? u32(left >> (32 - bits)) : u32(left) >> (32 - bits);
    });
  }
  void permute(u64 exec, i32 quad) {
    valid = 0;
    for (int l = 0; l < kLanes; ++l) {
      const int from = (l & ~3) | (quad >> 2 * (l & 3) & 3);
      own_[l] = x_[from];
      valid |= (exec >> from & 1) << l;
    }
    x_ = own_;
  }

  alignas(64) u32 own_[kLanes];
  const u32* x_ = own_;
};

template <typename T, auto F>
constexpr int arity = std::is_invocable_v<decltype(F), T>      ? 1
                      : std::is_invocable_v<decltype(F), T, T> ? 2
                                                               : 3;

// F of the numbers of type T in one register of each source, and the lanes that may be written.
// Float32 numbers are flushed before and after if the MODE register says so.
template <typename T, auto F>
u64 each_lane(const Wave& w, const Instruction& i, const int (&parts)[3], u32* out) {
  constexpr int n = arity<T, F>;
  const bool flushes = w.flushes_denormals;
  Lanes a(w, i, 1, parts[0]), b(w, i, n > 1 ? 2 : 1, parts[1]), c(w, i, n > 2 ? 3 : 1, parts[2]);
  for (Lanes* x : {&a, &b, &c}) x->flush_if<T>(flushes);
  const auto result = [&](int l) {
    if constexpr (n == 1) return F(a.get<T>(l));
    if constexpr (n == 2) return F(a.get<T>(l), b.get<T>(l));
    if constexpr (n == 3) return F(a.get<T>(l), b.get<T>(l), c.get<T>(l));
  };
  for (int l = 0; l < kLanes; ++l) out[l] = to_bits(result(l));
  if (flushes && std::is_same_v<decltype(result(0)), float>) {
    for (int l = 0; l < kLanes; ++l) out[l] = flushed(out[l]);
  }
  return w.exec() & a.valid;
}

template <typename T, auto F>
void vector(Wave& w, const Instruction& i) {
  u32 out[kLanes];
  const u64 lanes = each_lane<T, F>(w, i, {0, 0, 0}, out);
  w.put(i.operands[0].index, out, lanes);
}

// F's answers as bits of a mask; an inactive lane's bit is 0.
template <typename T, auto F>
void compare(Wave& w, const Instruction& i) {
  u32 out[kLanes];
  u64 mask = 0;
  constexpr auto as_number = [](T a, T b) { return u32{F(a, b)}; };
  const u64 lanes = each_lane<T, as_number>(w, i, {0, 0, 0}, out);
  for (int l = 0; l < kLanes; ++l) mask |= u64{out[l]} << l;
  w.set_pair(i.operands[0].index, mask & lanes);
}

}  // namespace cdna
