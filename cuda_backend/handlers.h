// The addresses of the XLA FFI handlers by the names of their stages, for jax.ffi.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace attn_dispatch {

// "instantiate", "initialize", "execute".
std::map<std::string, void*> ffi_handlers();

// "initialize" and "execute" of attn_dispatch_clear_rows.
std::map<std::string, void*> clear_rows_handlers();

// The same of attn_dispatch_clear_ends.
std::map<std::string, void*> clear_ends_handlers();

// "type_id" and "type_info" of the state that instantiate makes.
std::map<std::string, void*> ffi_state_type();

// Sets the driver's ordinals of the devices that JAX uses in this process. Instantiate plans for
// the first; for device 0 if this is empty or was never set.
void set_local_devices(const std::vector<int32_t>& ordinals);

}  // namespace attn_dispatch
