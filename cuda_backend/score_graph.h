// Adds a score program (score_program.h) to cuDNN's graph, one operation per node.
#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "score_program.h"

namespace attn_dispatch {
namespace fe = cudnn_frontend;

class ScoreGraph {
 public:
  using Graph = std::shared_ptr<fe::graph::Graph>;
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  // `arrays` are the tensors of o0, o1, ….
  ScoreGraph(ScoreProgram program, std::vector<Tensor> arrays)
      : program_(std::move(program)), arrays_(std::move(arrays)) {}

  // Adds the nodes of score_nodes and returns the new scores.
  Tensor forward(const Graph& graph, const Tensor& score) {
    score_ = score;
    return add_nodes(graph, 0, program_.forward_count, score);
  }

  // Adds the nodes of gradient_nodes and returns the gradient of the scores. Call `forward` first,
  // on the same graph.
  Tensor backward(const Graph& graph, const Tensor& grad) {
    grad_ = grad;
    return add_nodes(graph, program_.forward_count, program_.nodes.size(), grad);
  }

 private:
  using Pointwise = fe::graph::Pointwise_attributes;
  using Mode = fe::PointwiseMode_t;
  using Type = fe::DataType_t;
  using Source = ScoreOperand::Source;

  Tensor add_nodes(const Graph& graph, size_t first, size_t last, const Tensor& start) {
    // Only the indices that are read: cuDNN takes a tensor that nobody reads for a result, and
    // writes it.
    if (!t_ && program_.reads(Source::kQueryPosition, first, last)) t_ = index(graph, start, 2);
    if (!s_ && program_.reads(Source::kKeyPosition, first, last)) s_ = index(graph, start, 3);
    for (size_t i = first; i < last; ++i) nodes_.push_back(add(graph, program_.nodes[i]));
    return first == last ? start : nodes_.back();
  }

  static Tensor index(const Graph& graph, const Tensor& start, int axis) {
    return typed(
        graph->pointwise(start, attributes("index", Mode::GEN_INDEX, Type::INT32).set_axis(axis)),
        Type::INT32);
  }

  Tensor value(const ScoreOperand& operand) const {
    switch (operand.source) {
      case Source::kScore:
        return score_;
      case Source::kGradient:
        return grad_;
      case Source::kQueryPosition:
        return t_;
      case Source::kKeyPosition:
        return s_;
      case Source::kArray:
        return arrays_[operand.index];
      case Source::kNode:
        return nodes_[operand.index];
      case Source::kNumber:
        break;
    }
    return operand.kind == 'f' ? number(operand.number)
                               : number(static_cast<int32_t>(operand.index));
  }

  template <typename T>
  static Tensor number(T value) {
    return std::make_shared<fe::graph::Tensor_attributes>(value);
  }

  Tensor add(const Graph& graph, const ScoreNode& node) const {
    const Type type = node.kind() == 'f'   ? Type::FLOAT
                      : node.kind() == 'i' ? Type::INT32
                                           : Type::BOOLEAN;
    const auto how = attributes(node.name, mode(node.operation), type);
    std::vector<Tensor> x;
    for (const ScoreOperand& operand : node.operands) x.push_back(value(operand));
    // cuDNN has no operation that converts: multiply by 1.
    if (node.operation == Operation::convert) x.push_back(number(1.0f));
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

  static Mode mode(Operation operation) {
    switch (operation) {
#define OP(name, mode, operands, kinds) \
  case Operation::name:                 \
    return Mode::mode;
      ATTN_SCORE_OPERATIONS(OP)
#undef OP
    }
    return Mode::NOT_SET;
  }

  const ScoreProgram program_;
  const std::vector<Tensor> arrays_;
  Tensor score_, grad_, t_, s_;
  std::vector<Tensor> nodes_;
};

}  // namespace attn_dispatch
