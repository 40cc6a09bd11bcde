// Threads inside cuDNN, and what may end or copy the process while they are there.
//
// When a process ends, the destructors of cuDNN's objects run, and Python threads that return find
// no interpreter: either crashes. So the end lets nobody new in and waits for those who are inside.
// A forked child has its parent's memory without its threads: locks that nobody will release, and a
// CUDA driver that no longer works. So a child stays out of a cuDNN that its parent has used.
#pragma once

#include <chrono>

#include "status.h"

namespace attn_dispatch {

// A thread's stay inside cuDNN, or the reason why it was not let in.
class Visit {
 public:
  Visit();
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  const Status& status() const { return status_; }

  // Called by a thread that is about to wait for the interpreter's lock. Does not return if the
  // process has stopped waiting for this thread: there may be no interpreter any more.
  void return_to_interpreter();

 private:
  Status status_;
  bool returns_ = false;
};

// Lets no other thread in from now on, and waits at most this long for those who are inside. The
// caller does not hold the interpreter's lock. If it waited in vain, or in a forked child, the
// process will end without the destructors of its libraries.
void refuse_visits_and_wait(std::chrono::milliseconds limit);

// Makes forked children notice that they are children. Once for a process.
void notice_forks();

}  // namespace attn_dispatch
