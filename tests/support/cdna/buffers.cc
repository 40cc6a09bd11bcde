// Memory: scalar loads, buffers, and atomics.
//
// A buffer's descriptor is four scalar registers: the base in the first 48 bits, the stride in bits
// 61:48, NUM_RECORDS, and flags. NUM_RECORDS counts bytes, or records where an index is given to a
// buffer with a stride.
#include "checks.h"
#include "ops.h"
#include "queues.h"

namespace cdna {

void write_lds(Wave& w, const Pending& p, u64 address, u32 x);  // lds.cc

namespace {

u32 read(const Wave& w, u64 address) {
  u32 x;
  memcpy(&x, memory(w, address), 4);
  return x;
}
void write(const Wave& w, u64 address, u32 x) { memcpy(memory(w, address), &x, 4); }

void access_scalar(Wave& w, Pending& p) {
  const int dwords = p.instruction->operands[0].width;
  for (int n = 0; n < dwords; ++n) p.data[0][n] = read(w, p.address[0] + 4 * u64(n));
}

void load_scalar(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.scalar_queue, i, access_scalar);
  p.address[0] = w.pair(i.operands[1].index) + w.scalar(i.operands[2]);
  issued(w, w.scalar_queue, &i.operands[0]);
}

// Operands: data, address, descriptor, scalar offset.
template <int dwords>
void set_addresses(const Wave& w, const Instruction& i, Pending& p) {
  const u32* descriptor = &w.s[i.operands[2].index];
  const u64 base = descriptor[0] | u64{descriptor[1] & 0xffff} << 32;
  const u32 stride = descriptor[1] >> 16 & 0x3fff, records = descriptor[2];
  const u64 scalar_offset = w.scalar(i.operands[3]);
  const bool is_swizzled = descriptor[1] >> 31, adds_lane = descriptor[3] >> 23 & 1;
  if (is_swizzled || adds_lane) throw Fault("a swizzled buffer, or one with ADD_TID");
  if (i.flags & kIdxen && i.flags & kOffen) throw Fault("idxen with offen");
  for (int l = 0; l < kLanes; ++l) {
    const u64 given = i.operands[1].kind == kVgpr ? w.v[i.operands[1].index][l] : 0;
    const u64 index = i.flags & kIdxen ? given : 0;
    const u64 offset = (i.flags & kOffen ? given : 0) + u64(i64{i.immediate});
    const u64 inside = index * stride + offset;
    p.address[l] = base + scalar_offset + inside;
    p.in_range[l] = 0;
    for (int n = 0; n < dwords; ++n) {
      const bool by_index = i.flags & kIdxen && stride;
      const bool in = by_index ? index < records : inside + 4 * n + scalar_offset < records;
      p.in_range[l] |= u8(in << n);
    }
  }
}

bool is_on(const Pending& p, int lane) { return p.exec >> lane & 1; }
bool is_in_range(const Pending& p, int lane, int dword) { return p.in_range[lane] >> dword & 1; }
bool takes_part(const Pending& p, int lane) { return is_on(p, lane) && is_in_range(p, lane, 0); }

u32 lds_base(const Wave& w, const Instruction& i) { return w.s[kM0] + u32(i.immediate); }

template <int dwords>
void access_load(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < dwords && is_on(p, l); ++n) {
      const u32 x = is_in_range(p, l, n) ? read(w, p.address[l] + 4 * u64(n)) : 0;
      if (p.instruction->flags & kToLds) {  // lanes side by side
        write_lds(w, p, u64{p.lds_base} + 4 * u64(dwords * l + n), x);
      } else {
        p.data[n][l] = x;
      }
    }
  }
}

template <int dwords>
void load(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_load<dwords>);
  set_addresses<dwords>(w, i, p);
  p.lds_base = lds_base(w, i);
  issued(w, w.vector_queue, i.flags & kToLds ? nullptr : &i.operands[0]);
}

template <int dwords>
void access_store(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < dwords; ++n) {
      if (!is_on(p, l) || !is_in_range(p, l, n)) continue;
      write(w, p.address[l] + 4 * u64(n), p.data[n][l]);
    }
  }
}

template <int dwords>
void store(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_store<dwords>);
  set_addresses<dwords>(w, i, p);
  memcpy(p.data, w.v[i.operands[0].index], sizeof p.data[0] * dwords);
  issued(w, w.vector_queue, nullptr);
}

void access_store_half(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    if (!takes_part(p, l)) continue;
    const u64 address = p.address[l] & ~u64{3};
    const u32 shift = p.address[l] & 2 ? 16 : 0, kept = read(w, address) & ~(0xffffu << shift);
    write(w, address, kept | (p.data[0][l] & 0xffff) << shift);
  }
}

void store_half(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_store_half);
  set_addresses<1>(w, i, p);
  for (int l = 0; l < kLanes; ++l) {
    if (p.address[l] & 1 && is_on(p, l)) throw Fault("an odd address of 16 bits");
  }
  memcpy(p.data, w.v[i.operands[0].index], sizeof p.data[0]);
  issued(w, w.vector_queue, nullptr);
}

// Addresses are offsets, in a vector register, from a scalar base.
void set_global_addresses(const Wave& w, const Instruction& i, Pending& p, int offset, int base) {
  if (i.operands[base].kind != kSgpr) throw Fault("a global access without a scalar base");
  for (int l = 0; l < kLanes; ++l) {
    p.address[l] =
        w.pair(i.operands[base].index) + w.v[i.operands[offset].index][l] + u64(i64{i.immediate});
    p.in_range[l] = 1;
  }
}

// Operands: data, offset, base.
void global_load(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_load<1>);
  set_global_addresses(w, i, p, 1, 2);
  issued(w, w.vector_queue, &i.operands[0]);
}

// Operands: none, the address, none.
template <int dwords>
void global_load_to_lds(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_load<dwords>);
  const u32(*address)[kLanes] = &w.v[i.operands[1].index];
  for (int l = 0; l < kLanes; ++l) {
    p.address[l] = (address[0][l] | u64{address[1][l]} << 32) + u64(i64{i.immediate});
    p.in_range[l] = (1 << dwords) - 1;
  }
  p.lds_base = lds_base(w, i);
  issued(w, w.vector_queue, nullptr);
}

u32 add_f32(u32 a, u32 b) { return to_bits(to_float(a) + to_float(b)); }

template <auto Add>
u32 add_halves(u32 a, u32 b) {
  return Add(u16(a), u16(b)) | u32{Add(u16(a >> 16), u16(b >> 16))} << 16;
}
u16 add_bf16(u16 a, u16 b) { return to_bf16(from_bf16(a) + from_bf16(b)); }
u16 add_f16(u16 a, u16 b) { return to_f16(from_f16(a) + from_f16(b), Rounding::kNearestEven); }

template <auto Add>
void access_atomic(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    if (!takes_part(p, l)) continue;
    write(w, p.address[l], Add(read(w, p.address[l]), p.data[0][l]));
  }
}

template <auto Add>
void buffer_atomic(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_atomic<Add>);
  set_addresses<1>(w, i, p);
  memcpy(p.data, w.v[i.operands[0].index], sizeof p.data[0]);
  issued(w, w.vector_queue, nullptr);
}

// Operands: offset, data, base.
template <auto Add>
void global_atomic(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.vector_queue, i, access_atomic<Add>);
  set_global_addresses(w, i, p, 0, 2);
  memcpy(p.data, w.v[i.operands[1].index], sizeof p.data[0]);
  issued(w, w.vector_queue, nullptr);
}

constexpr Op kOps[] = {
    {"s_load_dword", load_scalar},
    {"s_load_dwordx2", load_scalar},
    {"s_load_dwordx4", load_scalar},
    {"s_load_dwordx8", load_scalar},
    {"s_load_dwordx16", load_scalar},
    {"buffer_load_dword", load<1>},
    {"buffer_load_dwordx2", load<2>},
    {"buffer_load_dwordx4", load<4>},
    {"global_load_lds_dwordx4", global_load_to_lds<4>},
    {"global_load_dword", global_load},
    {"buffer_store_short", store_half},
    {"buffer_store_dword", store<1>},
    {"buffer_store_dwordx2", store<2>},
    {"buffer_store_dwordx4", store<4>},
    {"buffer_atomic_add_f32", buffer_atomic<add_f32>},
    {"buffer_atomic_pk_add_bf16", buffer_atomic<add_halves<add_bf16>>},
    {"buffer_atomic_pk_add_f16", buffer_atomic<add_halves<add_f16>>},
    {"global_atomic_pk_add_bf16", global_atomic<add_halves<add_bf16>>},
};

}  // namespace

Ops buffer_ops() { return kOps; }

}  // namespace cdna
