// The addresses of the XLA FFI handlers of compiled FlashAttention-4, for jax.ffi.
#pragma once

#include <map>
#include <string>

namespace attn_dispatch {

// "instantiate", "initialize" and "execute" of attn_dispatch_fa4_forward.
std::map<std::string, void*> fa4_forward_handlers();

// The same of attn_dispatch_fa4_backward.
std::map<std::string, void*> fa4_backward_handlers();

// The same of attn_dispatch_fa4_tangent.
std::map<std::string, void*> fa4_tangent_handlers();

// The same of attn_dispatch_fa4_wide_forward.
std::map<std::string, void*> fa4_wide_forward_handlers();

// The same of attn_dispatch_fa4_wide_backward.
std::map<std::string, void*> fa4_wide_backward_handlers();

// "type_id" and "type_info" of the state that instantiate makes.
std::map<std::string, void*> fa4_state_type();

}  // namespace attn_dispatch
