// Branches, waits, barriers, and the end of a wave.
#include "ops.h"
#include "queues.h"

namespace cdna {
namespace {

template <auto Taken>
void branch(Wave& w, const Instruction& i) {
  if (Taken(w)) w.pc = i.target;
}

// The immediate holds vmcnt in its low byte, and lgkmcnt.
void wait_for_counters(Wave& w, const Instruction& i) {
  const size_t vector_allowed = size_t(i.immediate & 255), other_allowed = size_t(i.immediate >> 8);
  if (!must_wait(w, vector_allowed, other_allowed)) wait_for(w, vector_allowed, other_allowed);
}

void end(Wave& w, const Instruction&) {
  if (must_wait(w, 0, 0)) return;
  wait_for(w, 0, 0);
  w.ended = true;
}

void nothing(Wave&, const Instruction&) {}

constexpr Op kOps[] = {
    {"s_branch", branch<[](Wave&) { return true; }>},
    {"s_cbranch_scc0", branch<[](Wave& w) { return !w.scc; }>},
    {"s_cbranch_scc1", branch<[](Wave& w) { return w.scc; }>},
    {"s_cbranch_vccz", branch<[](Wave& w) { return !w.pair(kVcc); }>},
    {"s_cbranch_vccnz", branch<[](Wave& w) { return w.pair(kVcc) != 0; }>},
    {"s_cbranch_execz", branch<[](Wave& w) { return !w.exec(); }>},
    {"s_cbranch_execnz", branch<[](Wave& w) { return w.exec() != 0; }>},
    {"s_waitcnt", wait_for_counters},
    {"s_barrier", [](Wave& w, const Instruction&) { w.at_barrier = true; }},
    {"s_endpgm", end},
    {"s_nop", nothing},
    {"s_setprio", nothing},
    {"v_nop", nothing},
};

}  // namespace

Ops control_ops() { return kOps; }

}  // namespace cdna
