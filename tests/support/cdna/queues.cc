// Vector memory (vmcnt) lands in the order of issue, LDS (lgkmcnt) too, scalar loads in any order.
//
// One wave's accesses to LDS take place in order. With `lds_queue` those of a workgroup do, and
// only their data arrives late: some kernels read, pass s_barrier, and wait for the data only then,
// while another wave overwrites it. kTimed is a guess at hardware: memory answers after some time.
#include "queues.h"

#include "checks.h"

namespace cdna {
namespace {

// The counters saturate: an instruction past that waits to be issued.
constexpr size_t kMostVector = 63, kMostOther = 15;

void access(Wave& w, Pending& p) {
  if (!p.accessed) p.access(w, p);
  p.accessed = true;
}

u16* loads_to(Wave& w, const Operand& o) {
  return (o.kind == kSgpr ? w.loads_s : w.loads_v) + o.index;
}

void land(Wave& w, Queue& queue, size_t n = 0) {
  Pending p = std::move(queue[n]);
  queue.erase(queue.begin() + i64(n));
  access(w, p);
  const Operand* o = p.destination;
  for (int r = 0; o && r < o->width; ++r) {
    --loads_to(w, *o)[r];
    if (o->kind == kSgpr) {
      w.s[o->index + r] = p.data[0][r];
    } else {
      w.put(o->index + r, p.data[r], p.exec);
    }
  }
}

void wait_for_vector(Wave& w, size_t allowed) {
  while (w.vector_queue.size() > allowed) land(w, w.vector_queue);
}

void wait_for_other(Wave& w, size_t allowed) {
  auto& random = w.group->random;
  while (w.lds_queue.size() + w.scalar_queue.size() > allowed) {
    const bool scalar = !w.scalar_queue.empty() && (w.lds_queue.empty() || random() % 2);
    if (scalar) {
      land(w, w.scalar_queue, random() % w.scalar_queue.size());
    } else {
      land(w, w.lds_queue);
    }
  }
}

void set_times(Wave& w, Queue& queue, Pending& p, int lds_dwords) {
  Group& g = *w.group;
  if (&queue == &w.lds_queue) {  // the LDS of a workgroup moves 128 bytes in a cycle
    p.access_time = std::max(w.time, g.lds_free);
    g.lds_free = p.access_time + 2 * u64(std::max(1, lds_dwords));
    p.landing_time = g.lds_free + 64 + g.random() % 64;
  } else {
    p.landing_time = w.time + 300 + g.random() % 1200;
  }
  if (queue.size() > 1 && &queue != &w.scalar_queue) {
    p.landing_time = std::max(p.landing_time, queue[queue.size() - 2].landing_time + 1);
  }
  if (&queue != &w.lds_queue) p.access_time = p.landing_time;
}

}  // namespace

Pending& issue(Wave& w, Queue& queue, const Instruction& i, void (*access)(Wave&, Pending&)) {
  const bool is_vector = &queue == &w.vector_queue;
  if (w.group->is_timed() && queue.size() == (is_vector ? kMostVector : kMostOther)) {
    w.time = std::max(w.time, queue.front().landing_time);
    land_until(*w.group, w.time);
  }
  if (is_vector) {
    wait_for_vector(w, kMostVector - 1);
  } else {
    wait_for_other(w, kMostOther - 1);
  }
  Pending& p = queue.emplace_back();
  p.instruction = &i;
  p.access = access;
  p.exec = w.exec();
  p.epoch = w.group->epoch;
  return p;
}

void issued(Wave& w, Queue& queue, const Operand* destination) {
  Pending& p = queue.back();
  Group& g = *w.group;
  const int lds_dwords = destination ? destination->width : p.instruction->operands[1].width;
  if (g.is_timed()) set_times(w, queue, p, lds_dwords);
  p.destination = destination;
  for (int r = 0; destination && r < destination->width; ++r) ++loads_to(w, *destination)[r];
  if (&queue == &w.lds_queue && g.launch.lds_queue) {
    if (g.is_timed()) {
      g.lds_order.emplace_back(&w, &p);
    } else {
      access(w, p);
    }
  }
  if (g.launch.landing == kAtOnce) land(w, queue);
}

void wait_for(Wave& w, size_t vector_allowed, size_t other_allowed) {
  wait_for_vector(w, vector_allowed);
  wait_for_other(w, other_allowed);
}

bool must_wait(Wave& w, size_t vector_allowed, size_t other_allowed) {
  if (!w.group->is_timed()) return false;
  u64 until = 0;
  const auto wait_in_order = [&](const Queue& queue, size_t allowed) {
    if (queue.size() <= allowed) return;
    until = std::max(until, queue[queue.size() - 1 - allowed].landing_time);
  };
  wait_in_order(w.vector_queue, vector_allowed);
  if (w.lds_queue.size() + w.scalar_queue.size() > other_allowed) {
    for (const Pending& p : w.scalar_queue) until = std::max(until, p.landing_time);
    wait_in_order(w.lds_queue, other_allowed);
  }
  if (!until) return false;
  w.time = std::max(w.time, until);
  --w.pc;
  return true;
}

void land_until(Group& g, u64 time) {
  while (true) {
    u64 first = g.lds_order.empty() ? ~u64{0} : g.lds_order.front().second->access_time;
    Queue* queue = nullptr;
    Wave* wave = nullptr;
    for (Wave& w : g.waves) {
      for (Queue* q : {&w.vector_queue, &w.lds_queue, &w.scalar_queue}) {
        if (q->empty() || q->front().landing_time >= first) continue;
        first = q->front().landing_time;
        queue = q;
        wave = &w;
      }
    }
    if (first > time) return;
    if (queue) {
      land(*wave, *queue);
    } else {
      access(*g.lds_order.front().first, *g.lds_order.front().second);
      g.lds_order.pop_front();
    }
  }
}

void land_at_random(Group& g) {
  const u32 r = g.random();
  if (r % 4) return;
  Wave& w = g.waves[r / 4 % g.waves.size()];
  Queue& queue = r >> 16 & 1 ? w.vector_queue : r >> 17 & 1 ? w.lds_queue : w.scalar_queue;
  if (queue.empty()) return;
  land(w, queue, &queue == &w.scalar_queue ? (r >> 18) % queue.size() : 0);
}

}  // namespace cdna
