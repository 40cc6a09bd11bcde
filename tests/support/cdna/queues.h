// Accesses on their way: when they take place, and when s_waitcnt is satisfied.
#pragma once

#include "machine.h"

namespace cdna {

// Queues an access. The caller fills in addresses and data, and then calls `issued`.
Pending& issue(Wave& w, Queue& queue, const Instruction& i, void (*access)(Wave&, Pending&));

// The last access of the queue is complete but for its landing. `destination`: what it loads into.
void issued(Wave& w, Queue& queue, const Operand* destination);

// Lands accesses until no more than these are left.
void wait_for(Wave& w, size_t vector_allowed, size_t other_allowed);

// kTimed: true if the wave has to wait for them, and then tries its instruction again.
bool must_wait(Wave& w, size_t vector_allowed, size_t other_allowed);

// kTimed: lands what takes place until then.
void land_until(Group& g, u64 time);

// kRandom: perhaps lands an access of some wave.
void land_at_random(Group& g);

}  // namespace cdna
