// Published policies, driven by whole requests.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/promise.hpp"
#include "policy/lfuda.hpp"
#include "policy/list_policies.hpp"
#include "policy/live_queues.hpp"
#include "policy/named_blocks.hpp"
#include "policy/replayed.hpp"

namespace kvtier::policy {

// Least recently used first. The beginning of a prompt counts as used last. A request's own blocks
// are not evicted for its later ones.
class ReplayedLru final : public Replayed {
 public:
  explicit ReplayedLru(std::size_t capacity) : capacity_(capacity) {}

  std::size_t request(std::span<const Key> path, double now) override;
  std::size_t num_blocks() const override { return lists_.size(0); }
  std::size_t num_bytes() const override { return sizeof(*this) + lists_.num_bytes(); }
  void check() const override;

 private:
  std::size_t capacity_;
  BlockLists<1> lists_;
  std::vector<Index> path_;
};

// The policies as published: they know blocks, not prompts. The blocks of a request are used from
// the last one to the first, so its beginning is evicted last. A hit counts only if all blocks
// before it are hits.
template <typename Lists>
class ReplayedLists final : public Replayed {
 public:
  explicit ReplayedLists(std::size_t capacity) : capacity_(capacity), lists_(capacity) {}

  std::size_t request(std::span<const Key> path, double) override {
    std::size_t num_hits = 0;
    while (num_hits < path.size() && is_resident(lists_.find(path[num_hits]))) ++num_hits;
    for (std::size_t i = path.size(); i-- > 0;) {
      if (i >= kAhead) lists_.prefetch(path[i - kAhead]);
      use(path[i]);
    }
    return num_hits;
  }
  std::size_t num_blocks() const override { return lists_.num_blocks(); }
  std::size_t num_history() const override { return lists_.num_history(); }
  std::size_t num_bytes() const override { return sizeof(*this) + lists_.num_bytes(); }
  void check() const override {
    lists_.check();
    promise(num_blocks() <= capacity_, "lists: more blocks than there is room for");
  }

 private:
  static constexpr std::size_t kAhead = 8;
  static constexpr Index kAny = 0;  // items are not used

  bool is_resident(Index entry) const { return entry != kNone && lists_.is_resident(entry); }

  void use(Key key) {
    const Index entry = lists_.find(key);
    if (is_resident(entry)) return lists_.hit(entry);
    ++num_stored_;
    if (entry != kNone) lists_.missed(entry);
    if (lists_.num_blocks() == capacity_) {
      lists_.begin_evicting();
      lists_.leave([](Index) { return true; });
    }
    lists_.enter(key, kAny, 0);
  }

  std::size_t capacity_;
  Lists lists_;
};

// Evicts the ends of prompts first. A request's own blocks are not evicted for its later ones.
class ReplayedLfuda final : public Replayed {
 public:
  explicit ReplayedLfuda(std::size_t capacity) : capacity_(capacity), queues_(capacity, names_) {}

  std::size_t request(std::span<const Key> path, double now) override;
  std::size_t num_blocks() const override { return queues_.num_blocks(); }
  std::size_t num_bytes() const override {
    return sizeof(*this) + queues_.num_bytes() + names_.num_bytes();
  }
  void check() const override;

 private:
  void store(std::span<const Key> path);

  std::size_t capacity_;
  NamedBlocks names_;
  LiveQueues<Lfuda> queues_;
  std::vector<Index> path_;  // the blocks of the request that are resident
};

}  // namespace kvtier::policy
