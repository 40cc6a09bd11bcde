#include "hooks.h"

#include <string.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "export.h"
#include "numbers.h"

namespace attn_emulator {
namespace {

struct Hooks {
  std::string arch = "gfx942";
  int asm_answer = -1;
  AttnEmulatorServer server = nullptr;
  std::optional<std::string> next_failure;
  bool offers_newer = false;
  int64_t calls[4] = {};
  std::optional<AttnAiterForward> forward;
  std::optional<AttnAiterBackward> backward;
  std::optional<AttnAiterSplitKv> split_kv;
};

std::mutex mutex;
Hooks hooks;

std::lock_guard<std::mutex> lock() { return std::lock_guard<std::mutex>(mutex); }

template <typename Struct>
int copy(const std::optional<Struct>& from, void* into, int64_t size) {
  if (!from || size != static_cast<int64_t>(sizeof(Struct))) return 0;
  memcpy(into, &*from, sizeof(Struct));
  return 1;
}

}  // namespace

char generation_text[16] = "dev18";
thread_local bool serves_newer = false;

NewerScope::NewerScope() { serves_newer = true; }
NewerScope::~NewerScope() { serves_newer = false; }

bool offers_newer() {
  const auto guard = lock();
  return hooks.offers_newer;
}

std::string arch() {
  const auto guard = lock();
  return hooks.arch;
}

std::string generation() {
  const auto guard = lock();
  return serves_newer ? kNewerGeneration : generation_text;
}

int asm_answer(const AttnAiterCall& call) {
  const auto guard = lock();
  return hooks.asm_answer < 0 ? call.use_asm != 0 : hooks.asm_answer;
}

AttnEmulatorServer server() {
  const auto guard = lock();
  return hooks.server;
}

bool must_fail(std::string& message) {
  const auto guard = lock();
  if (!hooks.next_failure) return false;
  message = *hooks.next_failure;
  hooks.next_failure.reset();
  return true;
}

bool must_fail(AttnEmulatorCall kind, std::string& message) {
  {
    const auto guard = lock();
    ++hooks.calls[kind];
  }
  return must_fail(message);
}

void remember(const AttnAiterForward& forward) {
  const auto guard = lock();
  hooks.forward = forward;
}

void remember(const AttnAiterBackward& backward) {
  const auto guard = lock();
  hooks.backward = backward;
}

void remember(const AttnAiterSplitKv& split) {
  const auto guard = lock();
  hooks.split_kv = split;
}

void write(const std::string& text, char* into, int32_t size) {
  if (!into || size <= 0) return;
  const size_t length = std::min<size_t>(text.size(), size - 1);
  memcpy(into, text.data(), length);
  into[length] = '\0';
}

int failed(const std::string& sentence, char* message, int32_t size) {
  write(sentence, message, size);
  return 1;
}

}  // namespace attn_emulator

using attn_emulator::hooks;

ATTN_EXPORT void attn_emulator_set_arch(const char* arch) {
  const auto guard = attn_emulator::lock();
  hooks.arch = arch;
}

ATTN_EXPORT void attn_emulator_set_asm_answer(int answer) {
  const auto guard = attn_emulator::lock();
  hooks.asm_answer = answer;
}

ATTN_EXPORT void attn_emulator_set_server(AttnEmulatorServer server) {
  const auto guard = attn_emulator::lock();
  hooks.server = server;
}

ATTN_EXPORT void attn_emulator_fail_next(const char* message) {
  const auto guard = attn_emulator::lock();
  hooks.next_failure = message;
}

ATTN_EXPORT int64_t attn_emulator_calls(int kind) {
  const auto guard = attn_emulator::lock();
  return kind >= 0 && kind < 4 ? hooks.calls[kind] : 0;
}

ATTN_EXPORT int attn_emulator_last_call(int kind, void* into, int64_t size) {
  const auto guard = attn_emulator::lock();
  if (kind == ATTN_EMULATOR_FORWARD) return attn_emulator::copy(hooks.forward, into, size);
  if (kind == ATTN_EMULATOR_BACKWARD) return attn_emulator::copy(hooks.backward, into, size);
  if (kind == ATTN_EMULATOR_SPLIT_KV) return attn_emulator::copy(hooks.split_kv, into, size);
  return 0;
}

ATTN_EXPORT int attn_emulator_keep(uint64_t seed, uint64_t offset, int32_t sequence, int32_t head,
                                   int32_t row, int32_t col, float rate) {
  return attn_emulator::is_kept(seed, offset, sequence, head, row, col, rate);
}

ATTN_EXPORT void attn_emulator_set_generation(const char* generation) {
  const auto guard = attn_emulator::lock();
  strncpy(attn_emulator::generation_text, generation, sizeof attn_emulator::generation_text - 1);
}

ATTN_EXPORT void attn_emulator_offer_newer(int offers) {
  const auto guard = attn_emulator::lock();
  hooks.offers_newer = offers != 0;
}

ATTN_EXPORT void attn_emulator_reset(void) {
  const auto guard = attn_emulator::lock();
  hooks = {};
  strcpy(attn_emulator::generation_text, "dev18");
}
