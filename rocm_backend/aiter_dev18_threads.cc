// Threads that stay on one device each, from which ASM kernels of that device are launched.
#include "aiter_dev18_threads.h"

#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "aiter_adapter.h"

namespace attn_dispatch::aiter_adapter {
namespace {

// A thread on one device, which does the work of other threads, one at a time, while they wait. It
// lives as long as the process.
class DeviceThread {
 public:
  explicit DeviceThread(int device) : device_(device) {
    std::thread([this] { Serve(); }).detach();
  }

  int Run(const std::function<int()>& work, char* message, int32_t size) {
    if (process_ != getpid()) {
      return Fail(message, size,
                  "this process was forked from one that had used AITER on several devices, and "
                  "cannot use them");
    }
    std::lock_guard<std::mutex> one_caller(callers_);
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = &work;
    changed_.notify_all();
    changed_.wait(lock, [this] { return work_ == nullptr; });
    if (device_error_ == hipSuccess) return result_;
    return Fail(
        message, size,
        std::string("HIP cannot make the device current: ") + hipGetErrorString(device_error_));
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    bool is_on_device = false;
    while (true) {
      changed_.wait(lock, [this] { return work_ != nullptr; });
      // Tried again for the next caller if it fails: the device may have been busy.
      if (!is_on_device) device_error_ = hipSetDevice(device_);
      is_on_device = device_error_ == hipSuccess;
      if (is_on_device) result_ = (*work_)();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  const int device_;
  const pid_t process_ = getpid();
  std::mutex callers_;  // held by the caller whose work is done
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<int()>* work_ = nullptr;
  hipError_t device_error_ = hipSuccess;
  int result_ = 0;
};

DeviceThread& ThreadOf(int device) {
  static auto* mutex = new std::mutex;  // both leaked on purpose: threads may outlive destruction
  static auto* threads = new std::map<int, DeviceThread*>;
  std::lock_guard<std::mutex> lock(*mutex);
  DeviceThread*& found = (*threads)[device];
  if (!found) found = new DeviceThread(device);
  return *found;
}

}  // namespace

int RunOnDeviceThread(const std::function<int()>& work, char* message, int32_t size) {
  int device = 0;
  if (const hipError_t error = hipGetDevice(&device); error != hipSuccess) {
    return Fail(message, size,
                std::string("HIP has no current device: ") + hipGetErrorString(error));
  }
  static thread_local int device_of_thread = device;
  if (device == device_of_thread) return work();
  try {
    return ThreadOf(device).Run(work, message, size);
  } catch (const std::exception& error) {
    return Fail(message, size,
                std::string("a thread for another device cannot be started: ") + error.what());
  }
}

}  // namespace attn_dispatch::aiter_adapter
