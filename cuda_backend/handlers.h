// The XLA FFI handlers, as pybind11 hands them to jax.ffi: name of the stage, address.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace attn_dispatch {

// "instantiate", "initialize", "execute".
std::map<std::string, void*> ffi_handlers();

// "initialize", "execute" of attn_dispatch_clear_rows.
std::map<std::string, void*> clear_rows_handlers();

// "type_id", "type_info" of the state that instantiate makes.
std::map<std::string, void*> ffi_state_type();

// The driver's numbers of the devices that JAX uses in this process: instantiate plans for the
// first. Untold or empty, for device 0.
void set_local_devices(const std::vector<int32_t>& ordinals);

}  // namespace attn_dispatch
