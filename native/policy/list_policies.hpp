// Policies that others have, to compare with: blocks in lists.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "policy/block_lists.hpp"
#include "policy/replayed.hpp"

namespace kvtier::policy {

// Least recently used first. The beginning of a prompt counts as used last; a request's own blocks
// don't leave for its later ones.
class LruReplayed final : public Replayed {
 public:
  explicit LruReplayed(std::size_t capacity) : capacity_(capacity) {}

  std::size_t request(std::span<const Key> path, double now) override;
  std::size_t num_blocks() const override { return lists_.size(0); }
  std::size_t num_bytes() const override { return sizeof(*this) + lists_.num_bytes(); }
  void check() const override;

 private:
  std::size_t capacity_;
  BlockLists<1> lists_;
  std::vector<Index> path_;
};

// What those below have in common: they know blocks, and no prompts. The blocks of a request are
// used from its last to its first, so that its beginning leaves last; a hit counts only where all
// before it are hits.
template <std::size_t kNumLists>
class ListPolicy : public Replayed {
 public:
  std::size_t request(std::span<const Key> path, double) final {
    std::size_t num_hits = 0;
    while (num_hits < path.size() && is_resident(lists_.find(path[num_hits]))) ++num_hits;
    for (std::size_t i = path.size(); i-- > 0;) {
      if (i >= kAhead) lists_.prefetch(path[i - kAhead]);
      use(path[i]);
    }
    return num_hits;
  }
  std::size_t num_bytes() const final { return sizeof(*this) + lists_.num_bytes(); }

 protected:
  static constexpr std::size_t kAhead = 8;

  explicit ListPolicy(std::size_t capacity) : capacity_(capacity) {}

  // Lists 0 and 1, where there are two, are those of resident blocks.
  bool is_resident(Index block) const {
    return block != kNone && lists_[block].list < (kNumLists > 1 ? 2 : 1);
  }
  std::size_t num_resident() const {
    if constexpr (kNumLists > 1)
      return lists_.size(0) + lists_.size(1);
    else
      return lists_.size(0);
  }
  virtual void use(Key key) = 0;

  std::size_t capacity_;
  BlockLists<kNumLists> lists_;
};

// Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
class Arc final : public ListPolicy<4> {
 public:
  explicit Arc(std::size_t capacity) : ListPolicy(capacity) {}

  std::size_t num_blocks() const override { return num_resident(); }
  std::size_t num_history() const override {
    return lists_.size(kOnceGone) + lists_.size(kOftenGone);
  }
  void check() const override;

 private:
  static constexpr std::uint8_t kOnce = 0, kOften = 1, kOnceGone = 2, kOftenGone = 3;

  void use(Key key) override;
  void make_room(bool was_often);

  double target_ = 0.0;  // blocks for kOnce
};

// Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023: a tenth is for new ones.
class S3Fifo final : public ListPolicy<3> {
 public:
  explicit S3Fifo(std::size_t capacity)
      : ListPolicy(capacity), num_small_(capacity < 20 ? 1 : capacity / 10) {}

  std::size_t num_blocks() const override { return num_resident(); }
  std::size_t num_history() const override { return lists_.size(kGone); }
  void check() const override;

 private:
  static constexpr std::uint8_t kSmall = 0, kMain = 1, kGone = 2;

  void use(Key key) override;
  void leave_small();
  void leave_main();

  std::size_t num_small_;
};

// Zhang et al., SIEVE is simpler than LRU, NSDI 2024.
class Sieve final : public ListPolicy<1> {
 public:
  explicit Sieve(std::size_t capacity) : ListPolicy(capacity) {}

  std::size_t num_blocks() const override { return num_resident(); }
  void check() const override;

 private:
  void use(Key key) override;

  Index hand_ = kNone;  // kNone: at the oldest
};

}  // namespace kvtier::policy
