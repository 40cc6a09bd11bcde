// LDS, the memory of a workgroup, and moves between lanes by its wires.
#include "checks.h"
#include "ops.h"
#include "queues.h"

namespace cdna {

void write_lds(Wave& w, const Pending& p, u64 address, u32 x) {
  u32* at = lds_dword(w, address);
  if (!at) return;
  note_access(w, p, address, true, *at == x);
  *at = x;
}

namespace {

u32 read_lds(Wave& w, const Pending& p, u64 address) {
  const u32* at = lds_dword(w, address);
  if (!at) return 0;
  note_access(w, p, address, false, false);
  return *at;
}

u64 address_of(const Wave& w, const Instruction& i, const Operand& o, int lane) {
  return u64{w.v[o.index][lane]} + u64(i64{i.immediate});
}

template <int dwords>
void access_read(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < dwords; ++n) {
      if (p.exec >> l & 1) p.data[n][l] = read_lds(w, p, p.address[l] + 4 * u64(n));
    }
  }
}

// In each 16 lanes, lane l's half word n is half word l % 4 of the 64 bits of lane l / 4 + 4·n.
void access_read_transposed(Wave& w, Pending& p) {
  if (p.exec != kAllLanes) throw Fault("ds_read_b64_tr_b16 with inactive lanes");
  u16 in[kLanes][4];
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < 2; ++n) {
      const u32 x = read_lds(w, p, p.address[l] + 4 * u64(n));
      in[l][2 * n] = u16(x);
      in[l][2 * n + 1] = u16(x >> 16);
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    const int first = (l & ~15) + (l >> 2 & 3);
    for (int n = 0; n < 2; ++n) {
      p.data[n][l] = in[first + 8 * n][l & 3] | u32{in[first + 8 * n + 4][l & 3]} << 16;
    }
  }
}

template <auto Access>
void read(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, Access);
  for (int l = 0; l < kLanes; ++l) p.address[l] = address_of(w, i, i.operands[1], l);
  issued(w, w.lds_queue, &i.operands[0]);
}

template <int dwords>
void access_write(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < dwords; ++n) {
      if (p.exec >> l & 1) write_lds(w, p, p.address[l] + 4 * u64(n), p.data[n][l]);
    }
  }
}

template <int dwords>
void write(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, access_write<dwords>);
  for (int l = 0; l < kLanes; ++l) p.address[l] = address_of(w, i, i.operands[0], l);
  memcpy(p.data, w.v[i.operands[1].index], sizeof p.data[0] * dwords);
  issued(w, w.lds_queue, nullptr);
}

// Two numbers, whose offsets count one or 64 of them.
template <int dwords, int counted>
void access_read_two(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < 2 * dwords; ++n) {
      const u64 offset = u64(p.instruction->immediate >> 16 * (n / dwords) & 0xffff);
      const u64 address = p.address[l] + 4 * (dwords * counted * offset + u64(n % dwords));
      if (p.exec >> l & 1) p.data[n][l] = read_lds(w, p, address);
    }
  }
}

template <int dwords, int counted>
void read_two(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, access_read_two<dwords, counted>);
  for (int l = 0; l < kLanes; ++l) p.address[l] = w.v[i.operands[1].index][l];
  issued(w, w.lds_queue, &i.operands[0]);
}

void access_write_half(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(p.exec >> l & 1)) continue;
    const u64 address = p.address[l] & ~u64{3};
    const u32* at = lds_dword(w, address);
    if (!at) continue;
    const u32 shift = p.address[l] & 2 ? 16 : 0;
    write_lds(w, p, address, (*at & ~(0xffffu << shift)) | (p.data[0][l] & 0xffff) << shift);
  }
}

void write_half(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, access_write_half);
  for (int l = 0; l < kLanes; ++l) {
    p.address[l] = address_of(w, i, i.operands[0], l);
    if (p.address[l] & 1 && p.exec >> l & 1) throw Fault("an odd LDS address of 16 bits");
  }
  memcpy(p.data, w.v[i.operands[1].index], sizeof p.data[0]);
  issued(w, w.lds_queue, nullptr);
}

// Operands: the address and two dwords, whose offsets count dwords.
void access_write_two(Wave& w, Pending& p) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < 2; ++n) {
      const u64 offset = 4 * u64(p.instruction->immediate >> 16 * n & 0xffff);
      if (p.exec >> l & 1) write_lds(w, p, p.address[l] + offset, p.data[n][l]);
    }
  }
}

void write_two(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, access_write_two);
  for (int l = 0; l < kLanes; ++l) p.address[l] = w.v[i.operands[0].index][l];
  for (int n = 0; n < 2; ++n) memcpy(p.data[n], w.v[i.operands[1 + n].index], sizeof p.data[n]);
  issued(w, w.lds_queue, nullptr);
}

// Lane l gets the data of lane address / 4, or 0 of an inactive one; memory is not touched.
void permute_back(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, [](Wave&, Pending&) {});
  for (int l = 0; l < kLanes; ++l) {
    const u64 from = address_of(w, i, i.operands[1], l) / 4 % kLanes;
    p.data[0][l] = p.exec >> from & 1 ? w.v[i.operands[2].index][from] : 0;
  }
  issued(w, w.lds_queue, &i.operands[0]);
}

// Lane l's data goes to lane address / 4, the highest of several wins; memory is not touched.
void permute(Wave& w, const Instruction& i) {
  Pending& p = issue(w, w.lds_queue, i, [](Wave&, Pending&) {});
  std::fill_n(p.data[0], kLanes, 0);
  for (int l = 0; l < kLanes; ++l) {
    const u64 to = address_of(w, i, i.operands[1], l) / 4 % kLanes;
    if (p.exec >> l & 1) p.data[0][to] = w.v[i.operands[2].index][l];
  }
  issued(w, w.lds_queue, &i.operands[0]);
}

constexpr Op kOps[] = {
    {"ds_read_b32", read<access_read<1>>},
    {"ds_read_b64", read<access_read<2>>},
    {"ds_read_b128", read<access_read<4>>},
    {"ds_read_b64_tr_b16", read<access_read_transposed>},
    {"ds_write_b32", write<1>},
    {"ds_write_b64", write<2>},
    {"ds_write_b128", write<4>},
    {"ds_read2_b32", read_two<1, 1>},
    {"ds_read2_b64", read_two<2, 1>},
    {"ds_read2st64_b32", read_two<1, 64>},
    {"ds_read2st64_b64", read_two<2, 64>},
    {"ds_write_b16", write_half},
    {"ds_write2_b32", write_two},
    {"ds_permute_b32", permute},
    {"ds_bpermute_b32", permute_back},
};

}  // namespace

Ops lds_ops() { return kOps; }

}  // namespace cdna
