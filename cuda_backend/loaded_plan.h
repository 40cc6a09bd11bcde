// A plan on a device, and how it is executed. cuDNN takes the pointers of a call as a descriptor, a
// variant pack. To make one takes several times as long as all else that happens here in a call, so
// those of the last calls are kept: a program that runs again mostly gets the same memory.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "library.h"
#include "status.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace attn_dispatch {

struct Plan;

// Pointers as cuDNN takes them. It does not change, so threads may share it.
using VariantPack = std::shared_ptr<void>;

class LoadedPlan {
 public:
  // A graph that was loaded on a device.
  static Result<std::shared_ptr<const LoadedPlan>> of(
      std::shared_ptr<const Plan> plan, std::shared_ptr<cudnn_frontend::graph::Graph> graph);

  const Plan& plan() const { return *plan_; }

  // The variant pack of a pointer for each of the graph's buffers (buffers.h), and the workspace
  // after them.
  Result<VariantPack> pack(void* const* pointers) const;

  // Queues the call on the handle's stream. Safe from any number of threads, each with its own
  // handle.
  Status execute(cudnnHandle_t handle, const VariantPack& pack) const;

 private:
  LoadedPlan() = default;

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<cudnn_frontend::graph::Graph> graph_;
  void* descriptor_ = nullptr;      // cuDNN's plan, which graph_ owns
  ptrdiff_t engine_workspace_ = 0;  // where in the workspace that of cuDNN's engine begins
};

// The variant packs of a call site's last executions on one device.
class RecentPacks {
 public:
  // The pack of these pointers; null if it is not kept.
  VariantPack find(void* const* pointers, size_t count);

  // Keeps a pack in place of the oldest.
  void keep(void* const* pointers, size_t count, VariantPack pack);

 private:
  // Results are allocated before those of the run before are freed, so addresses alternate.
  static constexpr size_t kKept = 4;

  struct Entry {
    std::vector<void*> pointers;
    VariantPack pack;
  };

  std::mutex mutex_;
  std::array<Entry, kKept> entries_;
  size_t oldest_ = 0;
};

}  // namespace attn_dispatch
