#include "plan_line.h"

#include <cudnn_frontend.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace attn_dispatch {
using Json = nlohmann::json;

namespace {

constexpr size_t kLongestLine = size_t{1} << 26;  // bytes; a plan takes some 400,000

std::string hex(const std::vector<uint8_t>& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

constexpr std::array<int8_t, 256> hex_values() {
  std::array<int8_t, 256> values{};
  for (int8_t& value : values) value = -1;
  for (int i = 0; i < 10; ++i) values['0' + i] = static_cast<int8_t>(i);
  for (int i = 0; i < 6; ++i) values['a' + i] = static_cast<int8_t>(10 + i);
  return values;
}

// Decodes two digits for each byte; false if the text has anything else. A plan has some 200,000
// digits, so a branch for each would cost a millisecond.
bool from_hex(std::string_view text, std::vector<uint8_t>& bytes) {
  constexpr std::array<int8_t, 256> kValues = hex_values();
  if (text.size() % 2 || text.empty()) return false;
  bytes.resize(text.size() / 2);
  int wrong = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int high = kValues[static_cast<uint8_t>(text[2 * i])];
    const int low = kValues[static_cast<uint8_t>(text[2 * i + 1])];
    wrong |= high | low;
    bytes[i] = static_cast<uint8_t>(16 * high + low);
  }
  return wrong >= 0;
}

// FNV-1a, 64 bits, of all that a line holds. A damaged line must not reach cuDNN, which loads code
// from it.
std::string checksum(const Plan& plan) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](const auto& bytes) {
    for (const auto byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  };
  add(plan.key);
  add(plan.engine);
  add(std::to_string(plan.workspace_bytes));
  add(plan.blob);
  std::vector<uint8_t> digits;
  for (int shift = 56; shift >= 0; shift -= 8)
    digits.push_back(static_cast<uint8_t>(hash >> shift));
  return hex(digits);
}

}  // namespace

std::string format_plan(const Plan& plan) {
  const Json facts{{"key", plan.key},
                   {"engine", plan.engine},
                   {"workspace", plan.workspace_bytes},
                   {"checksum", checksum(plan)}};
  return facts.dump() + ' ' + hex(plan.blob);
}

Result<Plan> parse_plan(const std::string& line) {
  const Status wrong{Code::kWrongCall, "expected a plan as a line of JSON and digits"};
  // The blob is behind the JSON: parsing it as a part of that would take as long as lowering.
  const size_t space = line.rfind(' ');
  if (space == std::string::npos || line.size() > kLongestLine) return wrong;
  const Json facts = Json::parse(line.begin(), line.begin() + static_cast<ptrdiff_t>(space),
                                 /*callback=*/nullptr, /*allow_exceptions=*/false);
  const auto text = [&](const char* name) {
    const bool has = facts.is_object() && facts.contains(name) && facts[name].is_string();
    return has ? facts[name].get<std::string>() : "";
  };
  Plan plan;
  plan.key = text("key");
  plan.engine = text("engine");
  if (!facts.is_object() || !facts.contains("workspace") ||
      !facts["workspace"].is_number_unsigned()) {
    return wrong;
  }
  plan.workspace_bytes = facts["workspace"].get<int64_t>();
  if (plan.workspace_bytes < 0) return wrong;
  if (!from_hex(std::string_view(line).substr(space + 1), plan.blob)) return wrong;
  if (text("checksum") != checksum(plan)) return Status{Code::kWrongCall, "a damaged plan"};
  return plan;
}

}  // namespace attn_dispatch
