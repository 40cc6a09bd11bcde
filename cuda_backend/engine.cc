#include "engine.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "cudnn_failure.h"
#include "wrong_value.h"

namespace attn_dispatch {
namespace {

namespace fe = cudnn_frontend;

constexpr auto kUnknown = fe::KnobType_t::NOT_SET;
constexpr size_t kMostTextBytes = 1024;  // an engine with every knob takes half of them

const std::map<std::string, fe::KnobType_t>& knobs_by_name() {
#define KNOB(name)              \
  {                             \
    #name, fe::KnobType_t::name \
  }
  static const auto* const knobs = new std::map<std::string, fe::KnobType_t>{
      KNOB(SWIZZLE),          KNOB(TILE_SIZE),        KNOB(EDGE),
      KNOB(MULTIPLY),         KNOB(SPLIT_K_BUF),      KNOB(TILEK),
      KNOB(STAGES),           KNOB(REDUCTION_MODE),   KNOB(SPLIT_K_SLC),
      KNOB(IDX_MODE),         KNOB(SPECFILT),         KNOB(KERNEL_CFG),
      KNOB(WORKSPACE),        KNOB(TILE_CGA_M),       KNOB(TILE_CGA_N),
      KNOB(BLOCK_SIZE),       KNOB(OCCUPANCY),        KNOB(ARRAY_SIZE_PER_THREAD),
      KNOB(SPLIT_COLS),       KNOB(TILE_ROWS),        KNOB(TILE_COLS),
      KNOB(LOAD_SIZE),        KNOB(CTA_COUNT),        KNOB(STREAM_K),
      KNOB(SPLIT_P_SLC),      KNOB(TILE_M),           KNOB(TILE_N),
      KNOB(TILE_CGA),         KNOB(WARP_SPEC_CFG),    KNOB(SWAP_AB),
      KNOB(INPUT_TMA_ENABLE), KNOB(OUTPUT_TMA_ENABLE)};
#undef KNOB
  return *knobs;
}

// The name of a knob other than kUnknown.
std::string name_of(fe::KnobType_t knob) {
  for (const auto& [name, other] : knobs_by_name()) {
    if (other == knob) return name;
  }
  return "";
}

bool read_number(std::string_view text, int64_t& number) {
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end && number >= 0 &&
         number <= std::numeric_limits<int32_t>::max();
}

bool is_knob_name(const std::string& name) {
  return !name.empty() &&
         name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789") == std::string::npos;
}

}  // namespace

std::string format_engine(const Engine& engine) {
  std::map<std::string, int64_t> by_name;
  for (const auto& [knob, value] : engine.knobs) by_name[name_of(knob)] = value;
  std::ostringstream out;
  out << engine.id;
  for (const auto& [name, value] : by_name) out << ' ' << name << '=' << value;
  return out.str();
}

Result<Engine> parse_engine(const std::string& text) {
  const Status wrong =
      wrong_value("engine", "words as \"6 KERNEL_CFG=2 STREAM_K=1\", each knob once", text);
  if (text.size() > kMostTextBytes) return wrong;
  std::istringstream in(text);
  std::string word;
  Engine engine;
  if (!(in >> word) || !read_number(word, engine.id)) return wrong;
  std::set<std::string> names;
  std::string unknown;
  while (in >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return wrong;
    const std::string name = word.substr(0, equals);
    int64_t value = 0;
    if (!is_knob_name(name) || !names.insert(name).second ||
        !read_number(std::string_view(word).substr(equals + 1), value)) {
      return wrong;
    }
    const auto knob = knobs_by_name().find(name);
    if (knob == knobs_by_name().end()) {
      unknown = name;
    } else {
      engine.knobs[knob->second] = value;
    }
  }
  if (!unknown.empty()) {
    return Status{Code::kUnsupported, "engine: this library does not know the knob " + unknown};
  }
  return engine;
}

Result<std::string> proposed_engines(fe::graph::Graph& graph) {
  nlohmann::json proposed = nlohmann::json::array(), knobs = nlohmann::json::object();
  for (int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    Engine engine;
    if (fe::error_t error = graph.get_engine_and_knobs_at_index(i, engine.id, engine.knobs);
        error.is_bad()) {
      return cudnn_failure("a proposed engine could not be read", error.get_message(),
                           Code::kLibrary);
    }
    // An engine with a knob that the frontend does not know cannot be requested later.
    if (engine.knobs.count(kUnknown)) continue;
    proposed.push_back(format_engine(engine));
    auto& of_engine = knobs[std::to_string(engine.id)];
    if (!of_engine.is_null()) continue;
    of_engine = nlohmann::json::object();
    std::vector<fe::Knob> found;
    if (graph.get_knobs_for_engine(engine.id, found).is_bad()) continue;
    for (const fe::Knob& knob : found) {
      if (knob.type == kUnknown) continue;
      of_engine[name_of(knob.type)] = {knob.minValue, knob.maxValue, knob.stride};
    }
  }
  return nlohmann::json{{"proposed", proposed}, {"knobs", knobs}}.dump();
}

}  // namespace attn_dispatch
