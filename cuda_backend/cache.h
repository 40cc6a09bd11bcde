// A bounded map that builds each value once, however many threads ask for it at the same time.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace attn_dispatch {

struct CacheStats {
  int64_t size = 0;
  int64_t capacity = 0;
  int64_t builds = 0;
  int64_t hits = 0;
};

// Value must be cheap to copy. The least recently used entry goes first; who holds its value, or
// waits for it, keeps it.
template <typename Value>
class OnceCache {
 public:
  explicit OnceCache(size_t capacity) : capacity_(capacity) {}

  // The value under `key`, built by `build` (which must not throw) outside the lock if it is new.
  Value get(const std::string& key, const std::function<Value()>& build) {
    std::promise<Value> promise;
    std::shared_future<Value> future;
    bool is_new = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = index_.find(key); found != index_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        future = found->second->second;
        ++hits_;
      } else {
        is_new = true;
        future = promise.get_future().share();
        entries_.emplace_front(key, future);
        index_[key] = entries_.begin();
        ++builds_;
        if (entries_.size() > capacity_) {
          index_.erase(entries_.back().first);
          entries_.pop_back();
        }
      }
    }
    if (is_new) promise.set_value(build());
    return future.get();
  }

  CacheStats stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {static_cast<int64_t>(entries_.size()), static_cast<int64_t>(capacity_), builds_, hits_};
  }

 private:
  using Entry = std::pair<std::string, std::shared_future<Value>>;

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, typename std::list<Entry>::iterator> index_;
  int64_t builds_ = 0;
  int64_t hits_ = 0;
};

}  // namespace attn_dispatch
