#include "score_program.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <locale>
#include <map>
#include <sstream>

#include "wrong_value.h"

namespace attn_dispatch {
namespace {

using Source = ScoreOperand::Source;

// The types of an operation's operands and result (score_program.h).
enum Kinds { kNumbers, kFloats, kComparison, kChoice };

struct OperationFacts {
  Operation operation;
  size_t operands;
  Kinds kinds;
};

const std::map<std::string, OperationFacts>& operations() {
  static const auto* const all = new std::map<std::string, OperationFacts>{
#define OP(name, mode, operands, kinds) {#name, {Operation::name, operands, kinds}},
      ATTN_SCORE_OPERATIONS(OP)
#undef OP
  };
  return *all;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// The parts between separators; none if the text is empty.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  if (text.empty()) return parts;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string::npos; start = end + 1) {
    parts.push_back(text.substr(start, end - start));
  }
  parts.push_back(text.substr(start));
  return parts;
}

template <typename T>
bool read_integer(const std::string& digits, T* number) {
  const char* end = digits.data() + digits.size();
  const auto [rest, error] = std::from_chars(digits.data(), end, *number);
  return error == std::errc() && rest == end;
}

// Reads a float32 as NumPy writes it, whatever the locale: "-2.5", "1e-05", "inf", "nan".
bool read_float(const std::string& word, float* number) {
  const bool is_negative = word[0] == '-';
  const std::string size = word.substr(is_negative);
  if (size == "inf" || size == "nan") {
    *number = size == "nan" ? std::numeric_limits<float>::quiet_NaN()
                            : std::numeric_limits<float>::infinity();
    if (is_negative) *number = -*number;
    return true;
  }
  if (word.find_first_not_of("0123456789.+-e") != std::string::npos) return false;
  std::istringstream in(word);
  in.imbue(std::locale::classic());
  return (in >> *number) && in.peek() == std::char_traits<char>::eof();
}

class Parser {
 public:
  explicit Parser(const std::vector<NodeArray>& arrays)
      : arrays_(arrays), is_read_(arrays.size()) {}

  // Appends the nodes of one attribute.
  Status parse(const char* attribute, const std::string& text, bool is_backward) {
    const size_t first = program_.nodes.size();
    for (const std::string& node : split(text, ';')) {
      if (program_.nodes.size() == kMostScoreNodes) {
        return {Code::kWrongCall,
                std::string(attribute) + ": expected at most " + std::to_string(kMostScoreNodes) +
                    " nodes, those of score_nodes and gradient_nodes together, got more"};
      }
      ATTN_RETURN_IF_ERROR(add(attribute, node, is_backward));
    }
    if (!is_backward) program_.forward_count = program_.nodes.size();
    return check_use(attribute, first);
  }

  Status check_arrays() const {
    for (size_t i = 0; i < is_read_.size(); ++i) {
      if (!is_read_[i]) {
        return {Code::kWrongCall, "node_arrays: expected arrays that nodes read, got o" +
                                      std::to_string(i) + ", which none does"};
      }
    }
    return {};
  }

  ScoreProgram take() { return std::move(program_); }

 private:
  Status add(const char* attribute, const std::string& text, bool is_backward) {
    const auto wrong = [&](const std::string& expected) {
      return wrong_value(attribute, expected, text);
    };
    const std::vector<std::string> words = words_of(text);
    if (words.size() < 4 || words[1] != "=") return wrong("nodes as \"f1 = mul x #2.0\"");
    const std::string& name = words[0];
    int32_t number = 0;
    if ((name[0] != 'f' && name[0] != 'i' && name[0] != 'p') ||
        !read_integer(name.substr(1), &number) || number < 0) {
      return wrong("a node's name to be f, i or p and a number");
    }
    if (by_name_.count(name)) return wrong("a name that no other node has");
    const auto found = operations().find(words[2]);
    if (found == operations().end()) return wrong("an operation that is known");
    const OperationFacts& facts = found->second;
    if (words.size() - 3 != facts.operands) {
      return wrong(words[2] + " of " + std::to_string(facts.operands) +
                   (facts.operands == 1 ? " operand" : " operands"));
    }
    ScoreNode node{name, facts.operation, {}};
    for (size_t i = 3; i < words.size(); ++i) {
      ScoreOperand operand;
      if (!read(words[i], node.kind(), is_backward, &operand)) {
        return wrong(
            "operands to be x, t, s, g in gradient_nodes, an array, an earlier node or a "
            "number");
      }
      node.operands.push_back(operand);
    }
    if (!types_fit(facts.kinds, node)) {
      return wrong(
          "predicates to be of integers and read by select alone, and integers to be of integers");
    }
    for (const ScoreOperand& operand : node.operands) {
      if (operand.source == Source::kNode) last_reader_[operand.index] = program_.nodes.size();
      if (operand.source == Source::kArray) is_read_[operand.index] = true;
    }
    by_name_[name] = program_.nodes.size();
    program_.nodes.push_back(std::move(node));
    last_reader_.push_back(0);
    return {};
  }

  bool read(const std::string& word, char kind, bool is_backward, ScoreOperand* operand) const {
    if (word == "x") return set(operand, Source::kScore, 'f', 0);
    if (word == "t") return set(operand, Source::kQueryPosition, 'i', 0);
    if (word == "s") return set(operand, Source::kKeyPosition, 'i', 0);
    if (word == "g") return is_backward && set(operand, Source::kGradient, 'f', 0);
    if (word[0] == '#') return read_number(word.substr(1), kind, operand);
    if (word[0] == 'o') {
      int64_t index = -1;
      if (!read_integer(word.substr(1), &index) || index < 0 ||
          index >= static_cast<int64_t>(arrays_.size())) {
        return false;
      }
      return set(operand, Source::kArray, arrays_[index].kind, index);
    }
    const auto found = by_name_.find(word);
    return found != by_name_.end() && set(operand, Source::kNode, word[0], found->second);
  }

  static bool set(ScoreOperand* operand, Source source, char kind, int64_t index) {
    operand->source = source;
    operand->kind = kind;
    operand->index = index;
    return true;
  }

  // An integer is read as a float if the node is one.
  static bool read_number(const std::string& word, char kind, ScoreOperand* operand) {
    if (word.empty()) return false;
    int32_t whole = 0;
    if (kind != 'f' && read_integer(word, &whole)) {
      return set(operand, Source::kNumber, 'i', whole);
    }
    set(operand, Source::kNumber, 'f', 0);
    return read_float(word, &operand->number);
  }

  static bool types_fit(Kinds kinds, const ScoreNode& node) {
    const char made = node.kind();
    for (size_t i = 0; i < node.operands.size(); ++i) {
      const char read = node.operands[i].kind;
      if (kinds == kChoice && i == 2) {
        if (read != 'p') return false;
      } else if (read == 'p' || (made != 'f' && read != 'i')) {
        return false;
      }
    }
    switch (kinds) {
      case kFloats:
        return made == 'f';
      case kComparison:
        return made == 'p';
      case kNumbers:
      case kChoice:
        return made != 'p';
    }
    return false;
  }

  // Refuses nodes that are not read, from `first` on, except the last, which is the result.
  Status check_use(const char* attribute, size_t first) const {
    const auto& nodes = program_.nodes;
    if (nodes.size() == first) return {};
    for (size_t i = first; i + 1 < nodes.size(); ++i) {
      if (last_reader_[i] <= i) {
        return {Code::kWrongCall,
                std::string(attribute) +
                    ": expected a later node to read every node but the last, got " +
                    nodes[i].name + ", which none reads"};
      }
    }
    if (nodes.back().kind() != 'f') {
      return {Code::kWrongCall, std::string(attribute) +
                                    ": expected the last node to be a float, got " +
                                    nodes.back().name};
    }
    return {};
  }

  const std::vector<NodeArray>& arrays_;
  std::vector<bool> is_read_;  // by array
  ScoreProgram program_;
  std::vector<size_t> last_reader_;  // by node; 0 if none, as node 0 reads no node
  std::map<std::string, int64_t> by_name_;
};

Status too_long(const char* attribute, const Text& text) {
  if (static_cast<int64_t>(text.size()) <= kMostNodeText) return {};
  return {Code::kWrongCall, std::string(attribute) + ": expected at most " +
                                std::to_string(kMostNodeText) + " bytes, got " +
                                std::to_string(text.size())};
}

}  // namespace

bool ScoreProgram::reads(Source source, size_t first, size_t last) const {
  for (size_t i = first; i < last; ++i) {
    for (const ScoreOperand& operand : nodes[i].operands) {
      if (operand.source == source) return true;
    }
  }
  return false;
}

Result<std::vector<NodeArray>> node_arrays_of(const SdpaSpec& spec) {
  ATTN_RETURN_IF_ERROR(too_long("node_arrays", spec.node_arrays));
  const struct {
    const char* name;
    int64_t extent;
  } full[4] = {{"batch", spec.batch},
               {"num_heads", spec.num_heads},
               {"seq_len_q", spec.seq_len_q},
               {"seq_len_kv", spec.seq_len_kv}};
  std::vector<NodeArray> arrays;
  for (const std::string& text : split(spec.node_arrays, ',')) {
    const std::vector<std::string> words = words_of(text);
    if (words.size() != 5 || (words[0] != "f" && words[0] != "i")) {
      return wrong_value("node_arrays", "f or i and four extents of each array", text);
    }
    NodeArray array{words[0][0], {}};
    for (int i = 0; i < 4; ++i) {
      int64_t& extent = array.extents[i];
      if (!read_integer(words[i + 1], &extent) || (extent != 1 && extent != full[i].extent)) {
        return wrong_value("node_arrays",
                           "an extent of 1 or " + std::string(full[i].name) + '=' +
                               std::to_string(full[i].extent) + " in place " +
                               std::to_string(i + 1),
                           text);
      }
    }
    if (static_cast<int64_t>(arrays.size()) == kMostNodeArrays) {
      return Status{Code::kWrongCall, "node_arrays: expected at most " +
                                          std::to_string(kMostNodeArrays) + " arrays, got more"};
    }
    arrays.push_back(array);
  }
  return arrays;
}

Result<ScoreProgram> score_program_of(const SdpaSpec& spec, const std::vector<NodeArray>& arrays) {
  ATTN_RETURN_IF_ERROR(too_long("score_nodes", spec.score_nodes));
  ATTN_RETURN_IF_ERROR(too_long("gradient_nodes", spec.gradient_nodes));
  Parser parser(arrays);
  ATTN_RETURN_IF_ERROR(parser.parse("score_nodes", spec.score_nodes, /*is_backward=*/false));
  ATTN_RETURN_IF_ERROR(parser.parse("gradient_nodes", spec.gradient_nodes, /*is_backward=*/true));
  ATTN_RETURN_IF_ERROR(parser.check_arrays());
  return parser.take();
}

}  // namespace attn_dispatch
