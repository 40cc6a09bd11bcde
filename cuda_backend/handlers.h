// The XLA FFI handlers, as pybind11 hands them to jax.ffi: name of the stage, address.
#pragma once

#include <map>
#include <string>

namespace attn_dispatch {

// "instantiate", "initialize", "execute".
std::map<std::string, void*> ffi_handlers();

// "type_id", "type_info" of the state that instantiate makes.
std::map<std::string, void*> ffi_state_type();

}  // namespace attn_dispatch
