// What becomes of a plan that was made elsewhere and does not load here.
#pragma once

#include <memory>
#include <utility>

namespace attn_dispatch {

// What `load` makes of the plan. If it fails and the plan was imported, `build` makes the plan
// anew, once, and that is loaded instead. `replace` gets the new plan before it is loaded, so that
// a failure of the device is not answered with building it again; a plan of this process's own is
// never built again.
template <typename Plan, typename Load, typename Build, typename Replace>
auto loaded_or_remade(std::shared_ptr<const Plan> plan, Load&& load, Build&& build,
                      Replace&& replace) {
  auto loaded = load(plan);
  if (loaded.ok() || !plan->is_imported) return loaded;
  auto built = build(*plan);
  if (!built.ok()) return loaded;
  replace(built.value);
  return load(std::move(built.value));
}

}  // namespace attn_dispatch
