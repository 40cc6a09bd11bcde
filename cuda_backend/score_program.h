// Parses score programs, which compute new scores and their gradients. Python writes them as text
// (attn_dispatch/programs/nodes.py):
//
//   i0 = sub t s; i1 = abs i0; f2 = convert i1; f3 = mul f2 o0; f4 = sub x f3
//
// x is the score, and g the gradient of the program's result. t and s are the positions of query
// and key, o0, o1, … arrays, and #… numbers. The first letter of a node is its type: f for float32,
// i for int32, p for a predicate. The last node is the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"
#include "status.h"

namespace attn_dispatch {

// OP(name, cuDNN's mode, number of operands, types of operands and result). `kNumbers`: numbers
// give a number, which is an int32 only if all of them are. `kFloats`: numbers give a float.
// `kComparison`: int32 give a predicate. `kChoice`: two numbers and a predicate give a number.
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
  int64_t index = 0;  // of an array, or of a node among all nodes; or an integer
  float number = 0;   // any other number
};

struct ScoreNode {
  std::string name;
  Operation operation;
  std::vector<ScoreOperand> operands;

  char kind() const { return name[0]; }
};

struct ScoreProgram {
  std::vector<ScoreNode> nodes;  // of score_nodes, then of gradient_nodes
  size_t forward_count = 0;      // how many are of score_nodes

  bool reads(ScoreOperand::Source source, size_t first, size_t last) const;
};

// cuDNN's graphs have at most 256 operations, including those of attention (9.12 to 9.28). Planning
// takes 1.5 s with up to 100 nodes, and 9 s with 230 (sm80 and sm90, two CPU cores).
inline constexpr int64_t kMostScoreNodes = 256;
// Calls with 62 arrays run. With 100, cuDNN plans and then fails to find a pointer (H200, 9.19).
inline constexpr int64_t kMostNodeArrays = 62;
inline constexpr int64_t kMostNodeText = 1 << 16;  // bytes of each attribute

// An array that nodes read: each extent is 1 or that of the scores.
struct NodeArray {
  char kind;  // f or i
  int64_t extents[4];
};

// Parses node_arrays, the type and the extents of each array: "f 1 8 1 1, i 1 1 1 300".
Result<std::vector<NodeArray>> node_arrays_of(const SdpaSpec& spec);

// Parses the program of a spec that has these arrays. A node that no other reads is refused: cuDNN
// would take it for a result of the graph. So is an unread array: cuDNN would ask for no pointer to
// it.
Result<ScoreProgram> score_program_of(const SdpaSpec& spec, const std::vector<NodeArray>& arrays);

}  // namespace attn_dispatch
