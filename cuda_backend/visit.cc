#include "visit.h"

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

// What a forked child reads of its parent's, without a lock.
std::atomic<int> inside{0};
std::atomic<bool> has_entered_cudnn{false};
std::atomic<bool> is_copy_of_a_user{false};

struct Door {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_closed = false;
  std::thread::id closed_by;
  bool has_given_up = false;  // on those who are inside
  int returning = 0;          // to the interpreter, no longer to be stopped

  // The thread that ends the process may still come and go.
  bool stops_this_thread() const { return closed_by != std::this_thread::get_id(); }
};

// Leaked on purpose: threads may outlive static destruction.
Door& door() {
  static auto* instance = new Door;
  return *instance;
}

void in_forked_child() {
  if (has_entered_cudnn || inside > 0) is_copy_of_a_user = true;
}

void end_at_once(int status, void*) {
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

Visit::Visit() {
  ++inside;
  if (cudnn_version()) has_entered_cudnn = true;
  if (is_copy_of_a_user) {
    status_ = {Code::kLibrary,
               "cuDNN was in use when this process was forked, and neither it nor the CUDA driver "
               "works in a forked child; start processes with multiprocessing's \"spawn\" or "
               "\"forkserver\""};
    --inside;
    return;
  }
  std::lock_guard<std::mutex> lock(door().mutex);
  if (door().is_closed && door().stops_this_thread()) {
    status_ = {Code::kLibrary, "the process is ending"};
    --inside;
    door().changed.notify_all();  // who waits for the others may have counted this one
  }
}

Visit::~Visit() {
  if (!status_.ok()) return;
  std::lock_guard<std::mutex> lock(door().mutex);
  --inside;
  if (returns_) --door().returning;
  door().changed.notify_all();
}

void Visit::return_to_interpreter() {
  std::unique_lock<std::mutex> lock(door().mutex);
  while (door().has_given_up && door().stops_this_thread()) door().changed.wait(lock);
  returns_ = true;
  ++door().returning;
}

void refuse_visits_and_wait(std::chrono::milliseconds limit) {
  if (!is_copy_of_a_user) {
    std::unique_lock<std::mutex> lock(door().mutex);
    if (door().has_given_up) return;
    door().is_closed = true;
    door().closed_by = std::this_thread::get_id();
    if (door().changed.wait_for(lock, limit, [] { return inside == 0; })) return;
    door().has_given_up = true;
    door().changed.wait(lock, [] { return door().returning == 0; });
  }
  // Called before whatever was registered earlier, the destructors of cuDNN's objects among them.
  on_exit(end_at_once, nullptr);
}

void notice_forks() { pthread_atfork(nullptr, nullptr, in_forked_child); }

}  // namespace attn_dispatch
