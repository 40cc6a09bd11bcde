#include "cudnn_scope.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

#include "library.h"

namespace attn_dispatch {
namespace {

// A forked child reads these of its parent, without a lock.
std::atomic<int> threads_inside{0};
std::atomic<bool> has_entered_cudnn{false};
std::atomic<bool> was_forked_after_use{false};

std::atomic<bool> skips_destructors{false};  // when the process ends

// How far the end of the process has come.
struct Ending {
  std::mutex mutex;
  std::condition_variable changed;
  bool has_begun = false;
  std::thread::id ended_by;
  bool has_given_up = false;  // the end waits no longer for the threads inside
  int returning = 0;          // threads on their way to the interpreter, which must be let through

  // The thread that ends the process may still enter and leave.
  bool stops_this_thread() const { return ended_by != std::this_thread::get_id(); }
};

// Leaked on purpose: threads may outlive static destruction.
Ending& ending() {
  static auto* instance = new Ending;
  return *instance;
}

void in_forked_child() {
  if (has_entered_cudnn || threads_inside > 0) was_forked_after_use = true;
}

void exit_without_destructors(int status, void*) {
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

CudnnScope::CudnnScope() {
  ++threads_inside;
  if (cudnn_version()) has_entered_cudnn = true;
  if (was_forked_after_use) {
    status_ = {Code::kLibrary,
               "cuDNN was in use when this process was forked, and neither it nor the CUDA driver "
               "works in a forked child; start processes with multiprocessing's \"spawn\" or "
               "\"forkserver\""};
    --threads_inside;
    return;
  }
  std::lock_guard<std::mutex> lock(ending().mutex);
  if (ending().has_begun && ending().stops_this_thread()) {
    status_ = {Code::kLibrary, "the process is ending"};
    --threads_inside;
    ending().changed.notify_all();  // the waiting thread may have counted this one
  }
}

CudnnScope::~CudnnScope() {
  if (!status_.ok()) return;
  std::lock_guard<std::mutex> lock(ending().mutex);
  --threads_inside;
  if (is_returning_) --ending().returning;
  ending().changed.notify_all();
}

void CudnnScope::return_to_interpreter() {
  std::unique_lock<std::mutex> lock(ending().mutex);
  while (ending().has_given_up && ending().stops_this_thread()) ending().changed.wait(lock);
  is_returning_ = true;
  ++ending().returning;
}

void close_cudnn_and_wait(std::chrono::milliseconds limit) {
  if (!was_forked_after_use) {
    std::unique_lock<std::mutex> lock(ending().mutex);
    if (ending().has_given_up) return;
    ending().has_begun = true;
    ending().ended_by = std::this_thread::get_id();
    if (ending().changed.wait_for(lock, limit, [] { return threads_inside == 0; })) return;
    ending().has_given_up = true;
    ending().changed.wait(lock, [] { return ending().returning == 0; });
  }
  skips_destructors = true;
  before_destructors();
}

void before_destructors() {
  // Runs before everything that was registered earlier, such as the destructors of cuDNN's objects.
  if (skips_destructors) on_exit(exit_without_destructors, nullptr);
}

void watch_forks() { pthread_atfork(nullptr, nullptr, in_forked_child); }

}  // namespace attn_dispatch
