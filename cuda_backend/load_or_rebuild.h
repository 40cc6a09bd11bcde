// Loads a plan, and rebuilds one that was imported and does not load here.
#pragma once

#include <memory>
#include <utility>

namespace attn_dispatch {

// Returns `load(plan)`. If that fails and the plan was imported, `build` builds it anew, once, and
// the new plan is loaded. `replace` gets the new plan before it is loaded: if the device fails
// then, the next call finds a plan of this process, which is never rebuilt.
template <typename Plan, typename Load, typename Build, typename Replace>
auto load_or_rebuild(std::shared_ptr<const Plan> plan, Load&& load, Build&& build,
                     Replace&& replace) {
  auto loaded = load(plan);
  if (loaded.ok() || !plan->is_imported) return loaded;
  auto built = build(*plan);
  if (!built.ok()) return loaded;
  replace(built.value);
  return load(std::move(built.value));
}

}  // namespace attn_dispatch
