// A bounded cache that builds each value once, however many threads ask for it at the same time. A
// transient failure is returned to the threads that wait for it, and not kept.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "status.h"

namespace attn_dispatch {

struct CacheStats {
  int64_t size = 0;
  int64_t capacity = 0;
  int64_t builds = 0;
  int64_t hits = 0;
};

// T must be cheap to copy. The least recently used entry is evicted first; threads that wait for
// its value still get it.
template <typename T>
class OnceCache {
 public:
  using Value = Result<T>;

  explicit OnceCache(size_t capacity) : capacity_(capacity) {}

  // The value for `key`. If there is none, `build`, which must not throw, builds it outside the
  // lock.
  Value get(const std::string& key, const std::function<Value()>& build) {
    std::promise<Value> promise;
    std::shared_future<Value> future;
    int64_t build_number = 0;  // set if this thread builds the value
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = index_.find(key); found != index_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        future = found->second->future;
        ++hits_;
      } else {
        build_number = ++builds_;
        future = promise.get_future().share();
        entries_.push_front({key, future, build_number});
        index_[key] = entries_.begin();
        if (entries_.size() > capacity_) {
          index_.erase(entries_.back().key);
          entries_.pop_back();
        }
      }
    }
    if (build_number) {
      Value value = build();
      // Before the waiting threads get the value: one that asks again must find no entry.
      if (value.status.is_transient()) forget(key, build_number);
      promise.set_value(std::move(value));
    }
    return future.get();
  }

  // Replaces the value for `key`, or the build of it that is under way. Does nothing without
  // either.
  void replace(const std::string& key, T value) {
    std::promise<Value> promise;
    promise.set_value(std::move(value));
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) {
      found->second->future = promise.get_future().share();
      found->second->build_number = ++builds_;
    }
  }

  bool has(const std::string& key) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return index_.count(key) != 0;
  }

  CacheStats stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {static_cast<int64_t>(entries_.size()), static_cast<int64_t>(capacity_), builds_, hits_};
  }

 private:
  struct Entry {
    std::string key;
    std::shared_future<Value> future;
    int64_t build_number;
  };

  // Leaves an entry of another build, which the key may have by now if this build's was evicted.
  void forget(const std::string& key, int64_t build_number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found == index_.end() || found->second->build_number != build_number) return;
    entries_.erase(found->second);
    index_.erase(found);
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, typename std::list<Entry>::iterator> index_;
  int64_t builds_ = 0;
  int64_t hits_ = 0;
};

}  // namespace attn_dispatch
