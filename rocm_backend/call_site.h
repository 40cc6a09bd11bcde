// What a custom call's attributes say, decoded once: the part of an AITER call that does not change
// from one execution to the next.
#pragma once

#include <string>

#include "aiter_api.h"
#include "spec.h"
#include "status.h"

namespace attn_dispatch {

struct Attributes {
#define FIELD(type, name) type name{};
  ATTN_AITER_SPEC(FIELD)
#undef FIELD
};

// Which of the custom calls it is.
enum class Pass { kForward, kBackward, kSplitKv };

struct CallSite {
  std::string arch;
  AttnAiterCall call{};  // its scalars; pointers, sizes and strides come with the buffers
  bool has_gaps = false;

  float logits_soft_cap = 0;
  bool needs_lse = false;

  AttnAiterAccumulator accumulator = ATTN_AITER_SPLIT;
  bool deterministic = false;
  bool has_dbias = false;

  bool is_paged = false;
  bool heads_first_kv = false;
  int32_t value_page = 0;
  int32_t num_splits = 1;
};

// The call site, or the first attribute that is wrong: out of range, no word that is known,
// contradicted by another, or of another custom call.
Result<CallSite> decode(const Attributes& attributes, Pass pass);

}  // namespace attn_dispatch
