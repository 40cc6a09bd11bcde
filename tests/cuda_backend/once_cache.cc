// Tests of OnceCache, of load_or_rebuild and of cudnn_failure, which classifies cuDNN's messages.
// Prints "ok", or the first condition that does not hold.
#include "once_cache.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cudnn_failure.h"
#include "load_or_rebuild.h"
#include "status.h"

namespace {

using namespace attn_dispatch;
using Cache = OnceCache<int>;

constexpr int kThreads = 8;

// A device whose first `failures` loads run out of memory.
struct Device {
  int failures;
  int loads = 0;

  Cache::Value load() {
    if (loads++ < failures) return Status{Code::kDevice, "out of memory"};
    return loads;
  }
};

void successes_and_refusals_are_kept() {
  for (Code code : {Code::kOk, Code::kWrongCall, Code::kUnsupported, Code::kFinalizeFailed}) {
    Cache cache(4);
    int builds = 0;
    for (int i = 0; i < 3; ++i) {
      auto value = cache.get("key", [&]() -> Cache::Value {
        if (++builds; code == Code::kOk) return 7;
        return Status{code, "no"};
      });
      CHECK(value.status.code == code);
    }
    CHECK(builds == 1 && cache.stats().builds == 1 && cache.stats().hits == 2);
    CHECK(cache.stats().size == 1);
  }
}

void transient_failures_are_not_kept() {
  for (Code code : {Code::kLibrary, Code::kDevice}) {
    Cache cache(4);
    for (int i = 0; i < 3; ++i) {
      CHECK(cache.get("key", [&] { return Cache::Value(Status{code, "later"}); }).status.code ==
            code);
      CHECK(cache.stats().size == 0 && cache.stats().builds == i + 1);
    }
  }
}

void a_load_is_tried_again_after_out_of_memory() {
  Cache cache(4);
  Device device{2};
  const auto load = [&] { return cache.get("plan", [&] { return device.load(); }); };
  CHECK(load().status.message == "out of memory");
  CHECK(!load().ok());
  CHECK(load().ok() && load().value == 3 && device.loads == 3);
}

// All threads that wait get the failure; a thread that calls `get` later builds the value anew.
void threads_that_wait_get_the_failure() {
  Cache cache(4);
  std::atomic<int> builds{0}, failed{0};
  const std::function<Cache::Value()> fail = [&]() -> Cache::Value {
    ++builds;
    while (cache.stats().hits < kThreads - 1) std::this_thread::yield();  // until all wait
    return Status{Code::kDevice, "out of memory"};
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      failed += !cache.get("key", fail).ok();
      // The first thread to get the failure may build the value at once.
      CHECK(cache.get("key", [] { return Cache::Value(1); }).ok());
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(builds == 1 && failed == kThreads && cache.stats().builds == 2);
}

void each_value_is_built_once() {
  Cache cache(64);
  std::atomic<int> builds{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int key = 0; key < 64; ++key) {
        auto value = cache.get(std::to_string(key), [&, key] {
          ++builds;
          std::this_thread::yield();
          return Cache::Value(key);
        });
        CHECK(value.value == key);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(builds == 64 && cache.stats().hits == 64 * (kThreads - 1));
}

// A failing build whose entry was evicted does not remove a later entry of the same key.
void a_failing_build_removes_only_its_entry() {
  Cache cache(1);
  const auto build = [] { return Cache::Value(1); };
  auto value = cache.get("key", [&]() -> Cache::Value {
    CHECK(cache.get("another", build).ok() && cache.get("key", build).ok());
    return Status{Code::kLibrary, "later"};
  });
  CHECK(!value.ok() && cache.stats().size == 1);
  CHECK(cache.get("key", [] { return Cache::Value(2); }).value == 1);
}

void a_value_is_replaced() {
  Cache cache(4);
  cache.replace("key", 1);
  CHECK(cache.stats().size == 0);
  CHECK(cache.get("key", [] { return Cache::Value(2); }).value == 2);
  cache.replace("key", 3);
  CHECK(cache.get("key", [] { return Cache::Value(4); }).value == 3 && cache.stats().size == 1);
  // A value that was set during a build stays when that build fails.
  auto value = cache.get("another", [&]() -> Cache::Value {
    cache.replace("another", 5);
    return Status{Code::kDevice, "later"};
  });
  CHECK(!value.ok() && cache.get("another", [] { return Cache::Value(6); }).value == 5);
}

struct FakePlan {
  int number;
  bool is_imported;
};

// An imported plan that does not load is rebuilt once; a plan that this process made is not.
void imported_plans_that_do_not_load_are_rebuilt_once() {
  using Plan = std::shared_ptr<const FakePlan>;
  struct Outcome {
    bool is_imported, loads, builds, rebuilt_plan_loads;
    int loaded, built;  // the number of the loaded plan, or -1; the number of builds
  };
  for (const Outcome& o : {Outcome{true, true, true, true, 1, 0},
                           {true, false, true, true, 2, 1},
                           {true, false, false, true, -1, 1},
                           {true, false, true, false, -1, 1},
                           {false, false, true, true, -1, 0},
                           {false, true, true, true, 1, 0}}) {
    int built = 0, replaced = 0;
    const auto load = [&](Plan plan) -> Result<int> {
      if (plan->number == 1 ? o.loads : o.rebuilt_plan_loads) return plan->number;
      return Status{Code::kDevice, "does not load"};
    };
    const auto build = [&](const FakePlan& old) -> Result<Plan> {
      ++built;
      if (!o.builds) return Status{Code::kUnsupported, "no"};
      return Plan(std::make_shared<FakePlan>(FakePlan{old.number + 1, false}));
    };
    auto loaded = load_or_rebuild(Plan(std::make_shared<FakePlan>(FakePlan{1, o.is_imported})),
                                  load, build, [&](const Plan& plan) { replaced = plan->number; });
    CHECK((loaded.ok() ? loaded.value : -1) == o.loaded && built == o.built);
    CHECK(replaced == (built && o.builds ? 2 : 0));
    CHECK(loaded.ok() || loaded.status.message == "does not load");
  }
}

void failures_are_distinguished_from_refusals() {
  const auto code = [](const char* message) {
    return cudnn_failure("step", message, Code::kUnsupported).code;
  };
  CHECK(code("head dim is too large") == Code::kUnsupported);
  CHECK(code("finalize failed with message: no, and code: CUDNN_STATUS_NOT_SUPPORTED_SHAPE") ==
        Code::kUnsupported);
  CHECK(code("x failed with code: CUDNN_STATUS_ALLOC_FAILED") == Code::kLibrary);
  CHECK(code("e: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED") == Code::kLibrary);
  CHECK(code("e: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER") == Code::kLibrary);
  CHECK(code("e: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED") == Code::kLibrary);
  CHECK(cudnn_failure("load", "e: CUDNN_STATUS_INTERNAL_ERROR", Code::kDevice).code ==
        Code::kDevice);
  // cuDNN 9.28 writes this message about a soft cap on sm80.
  CHECK(
      code("Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: (CUDNN_STATUS_NOT_INITIALIZED == status) "
           "|| (CUDNN_STATUS_NOT_SUPPORTED == ((status) / 1000 * 1000))") == Code::kUnsupported);

  const std::string pages =
      "Warning: an engine\nReason: too wide\nError: CUDNN_STATUS_ALLOC_FAILED; at malloc\nmore";
  CHECK(cudnn_failure("plan", pages, Code::kUnsupported).message ==
        "plan: Error: CUDNN_STATUS_ALLOC_FAILED; at malloc");
  CHECK(cudnn_failure("plan", "Warning\nReason: too wide\nmore", Code::kUnsupported).message ==
        "plan: too wide");
}

}  // namespace

int main() {
  successes_and_refusals_are_kept();
  transient_failures_are_not_kept();
  a_load_is_tried_again_after_out_of_memory();
  threads_that_wait_get_the_failure();
  each_value_is_built_once();
  a_failing_build_removes_only_its_entry();
  a_value_is_replaced();
  imported_plans_that_do_not_load_are_rebuilt_once();
  failures_are_distinguished_from_refusals();
  std::puts("ok");
}
