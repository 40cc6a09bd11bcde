#include "module_functions.h"

#include <pybind11/stl.h>

#include "compiled_kernels.h"
#include "handlers.h"
#include "python_module.h"

namespace py = pybind11;

namespace attn_dispatch {
namespace {

// What Python needs to know of compiled kernels (attn_dispatch/fa4/compiled.py).
py::dict facts_of(const CompiledLibrary& library) {
  py::list sets;
  for (const auto& set : library.sets) {
    const AttnFa4Set& x = set->facts;
    sets.append(py::make_tuple(
        x.name, x.arch, x.dtype, x.head_dim, x.head_dim_v, x.forward_tile_m, x.forward_tile_n,
        x.backward_tile_m, x.backward_tile_n, x.backward_subtiles,
        set->by_rows.backward_grouped.exists(), set->takes_sinks(), x.variant, x.variant_name,
        x.variant_arrays, x.tangent_tile_m, x.tangent_tile_n, set->wide_full.forward.exists()));
  }
  py::dict facts;
  facts["path"] = to_python(library.path);
  facts["versions"] = library.versions;
  facts["sets"] = sets;
  return facts;
}

py::dict load(const py::object& path) {
  const std::string file = path_from(path);
  Result<const CompiledLibrary*> library;
  {
    py::gil_scoped_release release;
    library = load_compiled_library(file);
  }
  raise_if_error(library.status);
  return facts_of(*library.value);
}

}  // namespace

void add_fa4_functions(py::module_& m) {
  m.def("load_fa4", &load, py::arg("path"),
        "Load FlashAttention-4's compiled kernels; the first success is final. Returns the path, "
        "the versions of their sources, and the sets of kernels.");
  m.def(
      "fa4_handlers",
      [] {
        return std::map<std::string, std::map<std::string, py::capsule>>{
            {"forward", capsules(fa4_forward_handlers())},
            {"backward", capsules(fa4_backward_handlers())},
            {"tangent", capsules(fa4_tangent_handlers())},
            {"wide_forward", capsules(fa4_wide_forward_handlers())},
            {"wide_backward", capsules(fa4_wide_backward_handlers())}};
      },
      "Pass -> stage name -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "fa4_state_type", [] { return capsules(fa4_state_type()); },
      "The type_id and type_info of these handlers' state.");
}

}  // namespace attn_dispatch
