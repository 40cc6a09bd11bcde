// A workgroup's state: the registers of its waves, its LDS, and the accesses that are on their way.
//
// A vector instruction is a loop over 64 lanes. A load, store or atomic is queued when it is
// issued, with the addresses, the stored data and the EXEC mask of that moment, and lands later.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

namespace cdna {

constexpr int kLanes = 64;
constexpr u64 kAllLanes = ~u64{0};
constexpr int kVcc = 106, kM0 = 124, kExec = 126, kSgprs = 128;
constexpr int kFirstAgpr = 256, kVgprs = 512;

// What machine.py sends: the structs of its ctypes.

enum Kind : i32 { kNone, kSgpr, kVgpr, kConstant };
enum Flag : i32 { kIdxen = 1, kOffen = 2, kToLds = 4, kQuadPerm = 8, kSelects = 16 };
struct Operand {
  i32 kind, index, width, negate, absolute;
};
struct Instruction {
  // `immediate`: an offset, or two; the counts of s_waitcnt; lanes of quad_perm; op_sel, op_sel_hi,
  // neg_lo and neg_hi, four bits each; or a Select of each source, eight bits each.
  i32 op, flags, immediate, target, address;
  Operand operands[5];  // the destination first, as in assembly
};
struct Range {
  u64 begin, end;
};
enum Landing : i32 { kAtOnce, kLate, kRandom, kTimed };
enum Check : i32 { kCheckConflicts = 1, kCheckRegisters = 2 };
struct Launch {
  const Instruction* code;
  const Range* ranges;  // memory that the kernel may touch
  const u32* sgprs;     // before the numbers of the workgroup
  u64 most_instructions;
  u64 instructions_run, lds_out_of_range;  // results
  i32 length, ranges_length, entry, sgprs_length, group_id_mask;
  i32 grid[3];
  i32 threads, lds_bytes;
  i32 flushes_denormals;  // of float32, at the start
  i32 landing, lds_queue, quantum, seed, checks;
  u32 fill;  // what registers and LDS hold at the start
};

// A kernel did what no right kernel does, or what this interpreter does not know.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Wave;
struct Group;

struct Pending {
  const Instruction* instruction;
  void (*access)(Wave&, Pending&);  // moves `data` from or to memory
  bool accessed = false;
  u64 access_time = 0, landing_time = 0;  // kTimed
  u64 exec;
  u32 epoch;  // barriers that the workgroup had passed at the issue
  u64 address[kLanes];
  u8 in_range[kLanes];  // a bit for each dword
  u32 data[4][kLanes];
  u32 lds_base = 0;
  const Operand* destination = nullptr;
};
using Queue = std::deque<Pending>;

struct Wave {
  alignas(64) u32 v[kVgprs][kLanes];
  u32 s[kSgprs];
  bool flushes_denormals = false;  // of float32, as the MODE register says
  bool scc = false, ended = false, at_barrier = false;
  i32 pc = 0, id = 0;
  u64 time = 0;  // kTimed: cycles
  Group* group = nullptr;
  Queue vector_queue, lds_queue, scalar_queue;
  u16 loads_v[kVgprs] = {}, loads_s[kSgprs] = {};  // loads on their way to a register

  u64 pair(int index) const { return s[index] | u64{s[index + 1]} << 32; }
  void set_pair(int index, u64 x) { s[index] = u32(x), s[index + 1] = u32(x >> 32); }
  u64 exec() const { return pair(kExec); }

  u32 scalar(const Operand& o) const { return o.kind == kSgpr ? s[o.index] : u32(o.index); }
  u64 scalar_64(const Operand& o) const { return o.kind == kSgpr ? pair(o.index) : i64{o.index}; }

  void put(int row, const u32* x, u64 lanes) {
    for (int l = 0; l < kLanes; ++l) {
      if (lanes >> l & 1) v[row][l] = x[l];
    }
  }
};

// The last access of a wave to a dword of LDS.
struct LastAccess {
  u32 epochs = 0;  // 1 + the barriers passed
  i32 address = 0;
  u64 time = 0;
};

struct Conflict {
  u64 count = 0;
  u64 cycles = ~u64{0};  // kTimed: the fewest between the two
  std::string first;
};

struct Group {
  Launch& launch;
  std::vector<u8> lds;
  std::vector<Wave> waves;
  std::mt19937 random;
  u32 epoch = 0;                                     // barriers passed
  std::deque<std::pair<Wave*, Pending*>> lds_order;  // kTimed: accesses that LDS has yet to take
  u64 lds_free = 0;                                  // kTimed: when LDS takes the next
  std::vector<LastAccess> writes, reads;             // by dword and wave
  std::map<std::array<i32, 4>, Conflict> conflicts;  // by kind and address of both instructions

  explicit Group(Launch& launch) : launch(launch) {}
  bool is_timed() const { return launch.landing == kTimed; }
};

}  // namespace cdna
