#include "checks.h"

#include <cstdio>

namespace cdna {
namespace {

template <typename... Values>
std::string text(const char* format, Values... values) {
  char out[240];
  snprintf(out, sizeof out, format, values...);
  return out;
}

std::string describe(const Wave& w, const Pending& p, u64 address, bool is_write, int other,
                     bool other_wrote, i32 other_address) {
  const auto verb = [](bool write) { return write ? "written" : "read"; };
  return text("LDS %#x: %s at %#x by wave %d and %s at %#x by wave %d, barriers passed %u to %u",
              u32(address), verb(other_wrote), other_address, other, verb(is_write),
              p.instruction->address, w.id, p.epoch, w.group->epoch);
}

}  // namespace

u8* memory(const Wave& w, u64 address) {
  const Launch& launch = w.group->launch;
  if (address % 4) throw Fault(text("address %#llx is not a multiple of 4", address));
  for (int i = 0; i < launch.ranges_length; ++i) {
    const Range& range = launch.ranges[i];
    if (address >= range.begin && address + 4 <= range.end) {
      return reinterpret_cast<u8*>(address);
    }
  }
  throw Fault(text("address %#llx is in no buffer", address));
}

u32* lds_dword(const Wave& w, u64 address) {
  Group& g = *w.group;
  if (address % 4) throw Fault(text("LDS address %#llx is not a multiple of 4", address));
  if (address + 4 <= g.lds.size()) return reinterpret_cast<u32*>(&g.lds[address]);
  ++g.launch.lds_out_of_range;
  return nullptr;
}

// Waves that touch the same dword between the same barriers, counting an access from its issue to
// when it takes place, do so in an order that nothing determines: a conflict, unless all read, or
// all write the same value and read it only after that.
void note_access(Wave& w, const Pending& p, u64 address, bool is_write, bool same_value) {
  Group& g = *w.group;
  if (!(g.launch.checks & kCheckConflicts)) return;
  const size_t dword = address / 4 * g.waves.size(), own = dword + size_t(w.id);
  const bool harmless = is_write ? same_value : g.writes[own].epochs > p.epoch;
  for (size_t other = 0; other < g.waves.size() && !harmless; ++other) {
    const LastAccess &write = g.writes[dword + other], &read = g.reads[dword + other];
    const bool wrote = write.epochs > p.epoch;
    if (int(other) == w.id || !(wrote || (is_write && read.epochs > p.epoch))) continue;
    const LastAccess& before = wrote ? write : read;
    Conflict& found = g.conflicts[{wrote, before.address, is_write, p.instruction->address}];
    found.cycles = std::min(found.cycles, p.access_time - before.time);
    if (found.count++) continue;
    found.first = describe(w, p, address, is_write, int(other), wrote, before.address);
  }
  // With `lds_queue` it has taken place at its issue, wherever the wave is now.
  const bool at_issue = g.launch.lds_queue && !(p.instruction->flags & kToLds);
  const u32 until = at_issue ? p.epoch : g.epoch;
  (is_write ? g.writes : g.reads)[own] = {until + 1, p.instruction->address, p.access_time};
}

void check_registers(const Wave& w, const Instruction& i) {
  for (const Operand& o : i.operands) {
    if (o.kind != kSgpr && o.kind != kVgpr) continue;
    const u16* loads = o.kind == kVgpr ? w.loads_v : w.loads_s;
    for (int r = o.index; r < o.index + o.width; ++r) {
      if (!loads[r]) continue;
      const char file = o.kind == kSgpr ? 's' : r < kFirstAgpr ? 'v' : 'a';
      throw Fault(text("%c%d is used before its load has been waited for", file, r % kFirstAgpr));
    }
  }
}

}  // namespace cdna
