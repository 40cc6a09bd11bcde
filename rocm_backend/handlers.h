// The FFI handlers of this library, by the names of their stages, as Python registers them.
#pragma once

#include <map>
#include <string>

namespace attn_dispatch {

// {"instantiate", "execute"} of each custom call.
std::map<std::string, void*> forward_handlers();
std::map<std::string, void*> backward_handlers();
std::map<std::string, void*> split_kv_handlers();

// {"type_id", "type_info"} of the state that instantiate makes for execute.
std::map<std::string, void*> state_type();

}  // namespace attn_dispatch
