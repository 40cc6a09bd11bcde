// Keeps the process from ending, and forked children from planning, while threads are inside cuDNN.
//
// When a process ends, the destructors of cuDNN's objects run, and Python threads that return find
// no interpreter; either crashes. So at its end the process lets no new thread into cuDNN, and
// waits for those inside. A forked child has its parent's memory without its threads: locks that
// nobody will release, and a CUDA driver that does not work. So a child may not enter a cuDNN that
// its parent has used.
#pragma once

#include <chrono>

#include "status.h"

namespace attn_dispatch {

// The scope in which a thread is inside cuDNN. If `status()` is a failure, the thread was refused
// and must not call cuDNN.
class CudnnScope {
 public:
  CudnnScope();
  ~CudnnScope();
  CudnnScope(const CudnnScope&) = delete;
  CudnnScope& operator=(const CudnnScope&) = delete;

  const Status& status() const { return status_; }

  // Call this before waiting for the interpreter's lock. It does not return if the process no
  // longer waits for this thread, because there may be no interpreter any more.
  void return_to_interpreter();

 private:
  Status status_;
  bool is_returning_ = false;
};

// Refuses all other threads from now on, and waits at most this long for those inside. The caller
// must not hold the interpreter's lock. If the wait was in vain, or in a forked child, the process
// will end without running the destructors of its libraries.
void close_cudnn_and_wait(std::chrono::milliseconds limit);

// Call this right before the process exits. If destructors must not run, this registers the
// immediate exit again, so that it precedes those that a thread inside cuDNN has registered since,
// by loading a library.
void before_destructors();

// Lets forked children notice that they are children. Call it once per process.
void watch_forks();

}  // namespace attn_dispatch
