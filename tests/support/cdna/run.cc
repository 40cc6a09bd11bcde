// A launch: workgroups one after the other, and a workgroup's waves in an order that a seed
// chooses.
#include <cstdio>
#include <limits>

#include "checks.h"
#include "ops.h"
#include "queues.h"

namespace cdna {
namespace {

const std::vector<Op>& all_ops() {
  static const std::vector<Op> all = [] {
    std::vector<Op> ops;
    for (Ops some : {scalar_ops(), integer_ops(), float_ops(), lane_ops(), matrix_ops(),
                     buffer_ops(), lds_ops(), control_ops()}) {
      ops.insert(ops.end(), some.begin(), some.end());
    }
    return ops;
  }();
  return all;
}

void step(Wave& w) {
  Launch& launch = w.group->launch;
  if (w.pc < 0 || w.pc >= launch.length) throw Fault("the program counter left the code");
  const Instruction& i = launch.code[w.pc];
  const Op& op = all_ops()[size_t(i.op)];
  if (launch.checks & kCheckRegisters) check_registers(w, i);
  ++w.pc;
  if (++launch.instructions_run > launch.most_instructions) throw Fault("too many instructions");
  w.time += op.cycles;
  op.run(w, i);
  if (launch.landing == kRandom) land_at_random(*w.group);
}

void start(Group& g, const i32 (&id)[3]) {
  const Launch& launch = g.launch;
  g.lds.resize(size_t(launch.lds_bytes + 3) / 4 * 4);
  for (size_t n = 0; n < g.lds.size(); n += 4) memcpy(&g.lds[n], &launch.fill, 4);
  g.waves.resize(size_t(launch.threads / kLanes));
  if (launch.checks & kCheckConflicts) {
    g.writes.assign(g.lds.size() / 4 * g.waves.size(), {});
    g.reads = g.writes;
  }
  for (Wave& w : g.waves) {
    w.group = &g;
    w.id = int(&w - g.waves.data());
    w.pc = launch.entry;
    w.flushes_denormals = launch.flushes_denormals;
    w.time = g.random() % 256;
    std::fill_n(&w.v[0][0], kVgprs * kLanes, launch.fill);
    std::fill_n(w.s, kSgprs, launch.fill);
    std::copy_n(launch.sgprs, launch.sgprs_length, w.s);
    int next = launch.sgprs_length;
    for (int n = 0; n < 3; ++n) {
      if (launch.group_id_mask >> n & 1) w.s[next++] = u32(id[n]);
    }
    w.set_pair(kExec, kAllLanes);
    // The thread's x is in bits 9:0; y and z are 0.
    for (int l = 0; l < kLanes; ++l) w.v[0][l] = u32(w.id * kLanes + l);
  }
}

void pass_barrier(Group& g) {
  u64 time = 0;
  for (const Wave& w : g.waves) time = std::max(time, w.time);
  for (Wave& w : g.waves) {
    w.at_barrier = false;
    w.time = time;
  }
  ++g.epoch;
}

// The wave that goes on. `turn` counts since the last barrier.
size_t choose_wave(Group& g, size_t turn) {
  const size_t waves = g.waves.size();
  if (!g.is_timed()) {
    if (g.launch.seed > 0) return g.random() % waves;
    return g.launch.seed < 0 ? waves - 1 - turn % waves : turn % waves;
  }
  size_t first = waves;
  for (size_t n = 0; n < waves; ++n) {
    const Wave& w = g.waves[n];
    if (w.ended || w.at_barrier) continue;
    if (first == waves || w.time < g.waves[first].time) first = n;
  }
  land_until(g, g.waves[first].time);
  return first;
}

// How many instructions it runs before another wave's turn.
u32 choose_steps(Group& g) {
  if (g.is_timed()) return 1;
  if (g.launch.quantum == 0) return std::numeric_limits<u32>::max();
  const u32 quantum = u32(g.launch.quantum);
  return g.launch.seed > 0 ? 1 + u32(g.random() % (2 * quantum)) : quantum;
}

void run_waves(Group& g, const i32 (&id)[3]) {
  for (size_t turn = 0;;) {
    size_t live = 0, waiting = 0;
    for (const Wave& w : g.waves) {
      live += !w.ended;
      waiting += !w.ended && w.at_barrier;
    }
    if (!live) return;
    if (waiting == live) {
      pass_barrier(g);
      turn = 0;
      continue;
    }
    Wave& w = g.waves[choose_wave(g, turn++)];
    try {
      for (u32 n = choose_steps(g); n && !w.ended && !w.at_barrier; --n) step(w);
    } catch (const Fault& fault) {
      const int pc = std::clamp(w.pc, 1, g.launch.length) - 1;
      char where[120];
      snprintf(where, sizeof where, "group %d,%d,%d wave %d at %#x: ", id[0], id[1], id[2], w.id,
               g.launch.code[pc].address);
      throw Fault(where + std::string(fault.what()));
    }
  }
}

std::string describe(const Group& g) {
  std::string lines;
  for (const auto& [key, conflict] : g.conflicts) {
    lines += conflict.first + ", " + std::to_string(conflict.count) + " times";
    if (g.is_timed()) lines += ", " + std::to_string(conflict.cycles) + " cycles apart";
    lines += "\n";
  }
  return lines;
}

// The conflicts of the first workgroup that has any.
std::string run_groups(Launch& launch) {
  std::string conflicts;
  for (i32 z = 0; z < launch.grid[2]; ++z) {
    for (i32 y = 0; y < launch.grid[1]; ++y) {
      for (i32 x = 0; x < launch.grid[0]; ++x) {
        Group g(launch);
        g.random.seed(u32(launch.seed) * 1000003 + u32(x + 131 * (y + 137 * z)));
        start(g, {x, y, z});
        run_waves(g, {x, y, z});
        if (conflicts.empty()) conflicts = describe(g);
      }
    }
  }
  return conflicts;
}

}  // namespace
}  // namespace cdna

#define EXPORT extern "C" __attribute__((visibility("default")))

// The name of instruction number n, or null past the last.
EXPORT const char* cdna_op(int n) {
  const auto& ops = cdna::all_ops();
  return size_t(n) < ops.size() ? ops[size_t(n)].name : nullptr;
}

// Runs a launch. Returns 0 and its conflicts as lines, or 1 and what it did wrong.
EXPORT int cdna_run(cdna::Launch* launch, char* message, int size) {
  try {
    snprintf(message, size_t(size), "%s", cdna::run_groups(*launch).c_str());
    return 0;
  } catch (const std::exception& error) {
    snprintf(message, size_t(size), "%s", error.what());
    return 1;
  }
}
