// Eight threads load cuDNN, plan, export and import at the same time, and plan while the process
// ends. tests/scripts/sanitize.py builds this program with ThreadSanitizer. Prints "ok", or the
// first condition that does not hold. usage: threads CUDNN DEVICE_PROPERTIES, with the stand-ins
// beside the program
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cudnn_scope.h"
#include "library.h"
#include "plan.h"

namespace {

using namespace attn_dispatch;

constexpr int kThreads = 8;

SdpaSpec spec_of(int64_t length) {
  SdpaSpec spec;
  spec.dtype = Text("bfloat16");
  spec.batch = 1;
  spec.num_heads = spec.num_kv_heads = 2;
  spec.seq_len_q = spec.seq_len_kv = length;
  spec.head_dim = spec.head_dim_v = 64;
  spec.scale = 0.125f;
  spec.window_left = spec.window_right = -1;
  spec.bias_batch = spec.bias_heads = spec.bias_rows = 1;
  return spec;
}

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 3);
  const std::string cudnn = arguments[1];
  std::ifstream file(arguments[2]);
  const std::string properties{std::istreambuf_iterator<char>(file), {}};
  watch_forks();

  in_threads([&](int) {
    has_driver();
    cudnn_version();
    driver_is_stand_in();
    auto version = load_cudnn(cudnn, /*allow_stand_ins=*/true);
    CHECK(version.ok() && version.value == cudnn_version() && !cudnn_path().empty());
  });

  in_threads([&](int i) {
    const SdpaSpec spec = spec_of(128 * (1 + i % 4));
    auto plan = plan_for(spec, properties);
    CHECK(plan.ok() && has_plan(spec, properties).value && plan_cache_stats().size > 0);
    auto line = export_plan(spec, properties);
    CHECK(line.ok() && import_plan(spec, properties, line.value).ok());
    CHECK(engines_for(spec, properties).ok() && take_remade_plans().ok());
  });
  CHECK(plan_cache_stats().builds == 4);

  std::atomic<int> inside{0}, planned{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int64_t length = 1024 + 8 * i;; length += 8 * kThreads) {
        CudnnScope scope;
        if (!scope.status().ok()) return;
        ++inside;
        CHECK(plan_for(spec_of(length), properties).ok());
        ++planned;
        scope.return_to_interpreter();
        --inside;
      }
    });
  }
  while (planned < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  close_cudnn_and_wait(std::chrono::minutes(2));
  CHECK(inside == 0);
  for (auto& thread : threads) thread.join();
  std::puts("ok");
}
