// Marks a function that Python calls through ctypes.
#pragma once

#define ATTN_EXPORT extern "C" __attribute__((visibility("default")))
