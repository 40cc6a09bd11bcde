#include "noted_buffers.h"

#include <iterator>
#include <limits>
#include <map>

#include "emulator.h"
#include "export.h"

namespace attn_emulator {
namespace {

// The bytes of each buffer by its start.
thread_local std::map<uintptr_t, int64_t> noted;

}  // namespace

int64_t noted_bytes_from(const void* address) {
  if (noted.empty()) return std::numeric_limits<int64_t>::max();
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto after = noted.upper_bound(at);
  if (after == noted.begin()) return -1;
  const auto& [start, bytes] = *std::prev(after);
  const auto inside = static_cast<int64_t>(at - start);
  return inside < bytes ? bytes - inside : -1;
}

}  // namespace attn_emulator

// A call that failed before AITER leaves its notes behind; those that overlap the new buffer are
// dropped.
ATTN_EXPORT void attn_emulator_note_buffer(const void* start, int64_t bytes) {
  if (bytes == 0) return;  // its address may be that of another buffer
  auto& noted = attn_emulator::noted;
  const auto first = reinterpret_cast<uintptr_t>(start);
  for (auto it = noted.begin(); it != noted.end();) {
    const bool is_same = it->first == first && it->second == bytes;
    const bool overlaps = it->first < first + bytes && first < it->first + it->second;
    it = overlaps && !is_same ? noted.erase(it) : std::next(it);
  }
  noted[first] = bytes;
}

ATTN_EXPORT int attn_emulator_noted_buffer(int n, uint64_t* start, int64_t* bytes) {
  const auto& noted = attn_emulator::noted;
  if (n >= static_cast<int>(noted.size())) return 0;
  const auto& [address, size] = *std::next(noted.begin(), n);
  *start = address;
  *bytes = size;
  return 1;
}

ATTN_EXPORT void attn_emulator_clear_buffers(void) { attn_emulator::noted.clear(); }
