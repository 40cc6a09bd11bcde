// What becomes of a score, as nodes that Python writes (attn_dispatch/programs/nodes.py), put into
// a graph:
//
//   i0 = sub t s; i1 = abs i0; f2 = convert i1; f3 = mul f2 o0; f4 = sub x f3
//
// The last one is the result.
#pragma once

#include <cudnn_frontend.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace attn_dispatch {
namespace fe = cudnn_frontend;

class ScoreProgram {
 public:
  using Graph = std::shared_ptr<fe::graph::Graph>;
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  // `arrays` are o0, o1, ….
  explicit ScoreProgram(const std::vector<Tensor>& arrays) : arrays_(arrays) {}

  // From the scores on.
  Tensor forward(const Graph& graph, const std::string& nodes, const Tensor& score) {
    known_ = {{"x", score}};
    // None but those that are read: what nobody reads cuDNN takes for a result, and writes it.
    for (const auto& [word, axis] : {std::pair("t", 2), {"s", 3}}) {
      if (reads(nodes, word)) known_[word] = index(graph, score, axis);
    }
    for (size_t i = 0; i < arrays_.size(); ++i) known_["o" + std::to_string(i)] = arrays_[i];
    return put(graph, nodes, score);
  }

  // From their gradient on, in the graph that `forward` went before.
  Tensor backward(const Graph& graph, const std::string& nodes, const Tensor& grad) {
    known_["g"] = grad;
    for (const auto& [word, axis] : {std::pair("t", 2), {"s", 3}}) {
      if (!known_.count(word) && reads(nodes, word)) known_[word] = index(graph, grad, axis);
    }
    return put(graph, nodes, grad);
  }

 private:
  using Pointwise = fe::graph::Pointwise_attributes;
  using Mode = fe::PointwiseMode_t;
  using Type = fe::DataType_t;

  static bool reads(const std::string& nodes, const std::string& word) {
    return (nodes + " ").find(" " + word + " ") != std::string::npos ||
           nodes.find(" " + word + ";") != std::string::npos;
  }

  Tensor put(const Graph& graph, const std::string& nodes, const Tensor& start) {
    Tensor last = start;
    std::istringstream all(nodes);
    for (std::string node; std::getline(all, node, ';');) {
      std::istringstream words(node);
      std::string result, equals, operation;
      std::vector<Tensor> operands;
      words >> result >> equals >> operation;
      for (std::string word; words >> word;) operands.push_back(value(word, result[0]));
      last = known_[result] = add(graph, result, operation, operands);
    }
    return last;
  }

  static Tensor index(const Graph& graph, const Tensor& start, int axis) {
    return typed(
        graph->pointwise(start, attributes("index", Mode::GEN_INDEX, Type::INT32).set_axis(axis)),
        Type::INT32);
  }

  Tensor value(const std::string& word, char kind) const {
    if (word[0] != '#') return known_.at(word);
    const bool is_integer = word.find_first_of(".enf") == std::string::npos;
    if (is_integer && kind != 'f') {
      return std::make_shared<fe::graph::Tensor_attributes>(
          static_cast<int32_t>(std::strtol(word.c_str() + 1, nullptr, 10)));
    }
    return std::make_shared<fe::graph::Tensor_attributes>(std::strtof(word.c_str() + 1, nullptr));
  }

  static Tensor add(const Graph& graph, const std::string& name, const std::string& operation,
                    const std::vector<Tensor>& x) {
    const Type type = name[0] == 'f' ? Type::FLOAT : name[0] == 'i' ? Type::INT32 : Type::BOOLEAN;
    if (operation == "convert") {
      const auto one = std::make_shared<fe::graph::Tensor_attributes>(1.0f);
      return typed(graph->pointwise(x[0], one, attributes(name, Mode::MUL, type)), type);
    }
    const auto how = attributes(name, modes().at(operation), type);
    if (x.size() == 1) return typed(graph->pointwise(x[0], how), type);
    if (x.size() == 2) return typed(graph->pointwise(x[0], x[1], how), type);
    return typed(graph->pointwise(x[0], x[1], x[2], how), type);
  }

  static Pointwise attributes(const std::string& name, Mode mode, Type type) {
    return Pointwise().set_name("score_" + name).set_mode(mode).set_compute_data_type(type);
  }

  static Tensor typed(Tensor tensor, Type type) {
    tensor->set_data_type(type);
    return tensor;
  }

  static const std::map<std::string, Mode>& modes() {
    static const std::map<std::string, Mode> modes = {
        {"add", Mode::ADD},
        {"sub", Mode::SUB},
        {"mul", Mode::MUL},
        {"div", Mode::DIV},
        {"max", Mode::MAX},
        {"min", Mode::MIN},
        {"pow", Mode::POW},
        {"neg", Mode::NEG},
        {"abs", Mode::ABS},
        {"exp", Mode::EXP},
        {"log", Mode::LOG},
        {"tanh", Mode::TANH_FWD},
        {"logistic", Mode::SIGMOID_FWD},
        {"sin", Mode::SIN},
        {"cos", Mode::COS},
        {"tan", Mode::TAN},
        {"erf", Mode::ERF},
        {"sqrt", Mode::SQRT},
        {"rsqrt", Mode::RSQRT},
        {"ceil", Mode::CEIL},
        {"floor", Mode::FLOOR},
        {"reciprocal", Mode::RECIPROCAL},
        {"select", Mode::BINARY_SELECT},
        {"lt", Mode::CMP_LT},
        {"le", Mode::CMP_LE},
        {"gt", Mode::CMP_GT},
        {"ge", Mode::CMP_GE},
        {"eq", Mode::CMP_EQ},
        {"ne", Mode::CMP_NEQ},
    };
    return modes;
  }

  const std::vector<Tensor> arrays_;
  std::map<std::string, Tensor> known_;
};

}  // namespace attn_dispatch
