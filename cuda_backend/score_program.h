// What becomes of a score, as nodes that Python writes (attn_dispatch/programs/nodes.py):
//
//   i0 = sub t s; i1 = abs i0; f2 = convert i1; f3 = mul f2 o0; f4 = sub x f3
//
// x is the score, g the gradient of what the program made of it, t and s are the positions of query
// and key, o0, o1, … arrays, and #… numbers. The first letter of a node is its type: f for float32,
// i for int32, p for a predicate. The last node is the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// OP(name, cuDNN's mode, operands, what they are and what they make). `kNumbers`: numbers make a
// number, which is whole if all of them are. `kFloats`: numbers make a float. `kComparison`: whole
// numbers make a predicate. `kChoice`: two numbers and a predicate make a number.
// clang-format off
#define ATTN_SCORE_OPERATIONS(OP)        \
  OP(add, ADD, 2, kNumbers)              \
  OP(sub, SUB, 2, kNumbers)              \
  OP(mul, MUL, 2, kNumbers)              \
  OP(div, DIV, 2, kFloats)               \
  OP(max, MAX, 2, kNumbers)              \
  OP(min, MIN, 2, kNumbers)              \
  OP(pow, POW, 2, kFloats)               \
  OP(neg, NEG, 1, kNumbers)              \
  OP(abs, ABS, 1, kNumbers)              \
  OP(exp, EXP, 1, kFloats)               \
  OP(log, LOG, 1, kFloats)               \
  OP(tanh, TANH_FWD, 1, kFloats)         \
  OP(logistic, SIGMOID_FWD, 1, kFloats)  \
  OP(sin, SIN, 1, kFloats)               \
  OP(cos, COS, 1, kFloats)               \
  OP(tan, TAN, 1, kFloats)               \
  OP(erf, ERF, 1, kFloats)               \
  OP(sqrt, SQRT, 1, kFloats)             \
  OP(rsqrt, RSQRT, 1, kFloats)           \
  OP(ceil, CEIL, 1, kFloats)             \
  OP(floor, FLOOR, 1, kFloats)           \
  OP(reciprocal, RECIPROCAL, 1, kFloats) \
  OP(convert, MUL, 1, kFloats)           \
  OP(select, BINARY_SELECT, 3, kChoice)  \
  OP(lt, CMP_LT, 2, kComparison)         \
  OP(le, CMP_LE, 2, kComparison)         \
  OP(gt, CMP_GT, 2, kComparison)         \
  OP(ge, CMP_GE, 2, kComparison)         \
  OP(eq, CMP_EQ, 2, kComparison)         \
  OP(ne, CMP_NEQ, 2, kComparison)
// clang-format on

enum class Operation {
#define OP(name, mode, operands, kinds) name,
  ATTN_SCORE_OPERATIONS(OP)
#undef OP
};

struct ScoreOperand {
  enum class Source { kScore, kGradient, kQueryPosition, kKeyPosition, kArray, kNode, kNumber };

  Source source = Source::kScore;
  char kind = 'f';    // f, i or p
  int64_t index = 0;  // of an array, or of a node among all nodes; or a whole number
  float number = 0;   // a number that is no whole one
};

struct ScoreNode {
  std::string name;
  Operation operation;
  std::vector<ScoreOperand> operands;

  char kind() const { return name[0]; }
};

struct ScoreProgram {
  std::vector<ScoreNode> nodes;  // from the score on, then from its gradient on
  size_t forward_count = 0;      // nodes of the first kind

  bool reads(ScoreOperand::Source source, size_t first, size_t last) const;
};

// cuDNN's graphs have at most 256 operations, those of attention among them (9.12 to 9.28). Up to
// 100 nodes plan in 1.5 s, 230 in 9 s (sm80 and sm90, two CPU cores).
inline constexpr int64_t kMostScoreNodes = 256;
// With 62 arrays plans run; with 100 cuDNN plans and then finds no pointer (H200, 9.19).
inline constexpr int64_t kMostNodeArrays = 62;
inline constexpr int64_t kMostNodeText = 1 << 16;  // bytes of each attribute

// An array that nodes read: each extent is 1 or that of the scores.
struct NodeArray {
  char kind;  // f or i
  int64_t extents[4];
};

// "f 1 8 1 1, i 1 1 1 300": the type and the extents of each array.
Result<std::vector<NodeArray>> node_arrays_of(const SdpaSpec& spec);

// The program of a spec, whose arrays are these. A node that nobody reads is refused: cuDNN would
// take it for a result of the graph. So is an array, for which cuDNN would want no pointer.
Result<ScoreProgram> score_program_of(const SdpaSpec& spec, const std::vector<NodeArray>& arrays);

}  // namespace attn_dispatch
