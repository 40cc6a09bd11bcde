// Tests of CudnnScope: threads are inside cuDNN when the process ends or forks. Prints "ok", or the
// first condition that does not hold. usage: cudnn_scope [stay]; with `stay` one thread never
// leaves cuDNN, and the exit status is 3.
#include "cudnn_scope.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "library.h"

// CudnnScope calls this function: a version other than 0 means that cuDNN is loaded.
int64_t attn_dispatch::cudnn_version() { return 91900; }

namespace {

using namespace attn_dispatch;
using std::chrono::milliseconds;

constexpr int kThreads = 8;

struct Destructor {
  ~Destructor() { std::puts("a destructor ran"); }
} destructor;

void a_forked_child_is_refused() {
  CudnnScope mine;
  CHECK(mine.status().ok());
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    CudnnScope scope;
    _exit(scope.status().message.find("forked") == std::string::npos);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CudnnScope again;
  CHECK(again.status().ok());
}

void the_end_waits_for_threads_inside() {
  std::atomic<int> inside{0}, refused{0}, begun{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      while (true) {
        CudnnScope scope;
        if (!scope.status().ok()) {
          CHECK(scope.status().message == "the process is ending");
          ++refused;
          return;
        }
        ++inside;
        ++begun;
        std::this_thread::sleep_for(milliseconds(1));
        scope.return_to_interpreter();
        --inside;
      }
    });
  }
  while (begun < 4 * kThreads) std::this_thread::yield();
  close_cudnn_and_wait(milliseconds(60'000));
  CHECK(inside == 0);
  CudnnScope mine;
  CHECK(mine.status().ok());
  mine.return_to_interpreter();
  for (auto& thread : threads) thread.join();
  CHECK(refused == kThreads);
}

// A thread that leaves cuDNN late does not return: the interpreter may be gone.
void a_late_thread_does_not_return() {
  static std::atomic<bool> is_inside{false}, may_leave{false}, has_returned{false};
  std::thread([] {
    CudnnScope scope;
    is_inside = true;
    while (!may_leave) std::this_thread::yield();
    scope.return_to_interpreter();
    has_returned = true;
  }).detach();
  while (!is_inside) std::this_thread::yield();
  close_cudnn_and_wait(milliseconds(10));
  may_leave = true;
  std::this_thread::sleep_for(milliseconds(200));
  CHECK(!has_returned);
}

}  // namespace

int main(int count, char** arguments) {
  watch_forks();
  if (count > 1 && std::strcmp(arguments[1], "stay") == 0) {
    a_late_thread_does_not_return();
    std::puts("ok");
    return 3;
  }
  a_forked_child_is_refused();
  the_end_waits_for_threads_inside();
  std::puts("ok");
}
