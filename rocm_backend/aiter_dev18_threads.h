// Launches of ASM kernels, which generation "dev18" binds to the host thread and device that loaded
// them.
#pragma once

#include <cstdint>
#include <functional>

namespace attn_dispatch::aiter_adapter {

// Runs `work`, which launches ASM kernels on the current device and never throws. AITER loads each
// kernel once per host thread, on the device that is current then. So a thread whose current device
// has changed hands the work to a thread that stays on the new device, and waits for it.
int RunOnDeviceThread(const std::function<int()>& work, char* message, int32_t size);

}  // namespace attn_dispatch::aiter_adapter
