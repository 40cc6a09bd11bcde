// The instructions by name, in the groups in which they are implemented.
#pragma once

#include <span>

#include "machine.h"

namespace cdna {

struct Op {
  const char* name;
  void (*run)(Wave&, const Instruction&);
  u32 cycles = 4;  // kTimed, roughly: 64 lanes on 16 units
};
using Ops = std::span<const Op>;

Ops scalar_ops();
Ops integer_ops();
Ops float_ops();
Ops lane_ops();
Ops matrix_ops();
Ops buffer_ops();
Ops lds_ops();
Ops control_ops();

}  // namespace cdna
