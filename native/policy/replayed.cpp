#include "policy/replayed.hpp"

#include <vector>

#include "common/promise.hpp"
#include "policy/lfuda.hpp"
#include "policy/list_policies.hpp"
#include "policy/live_queues.hpp"
#include "policy/named_blocks.hpp"
#include "policy/run_policy.hpp"

namespace kvtier::policy {

namespace {

// Least recently used first. The beginning of a prompt counts as used last. A request's own blocks
// are not evicted for its later ones.
class ReplayedLru final : public Replayed {
 public:
  explicit ReplayedLru(std::size_t capacity) : capacity_(capacity) {}

  std::size_t request(std::span<const Key> path, double) override {
    path_.clear();
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (i + 8 < path.size()) lists_.prefetch(path[i + 8]);
      const Index block = lists_.find(path[i]);
      if (block == kNone) break;
      path_.push_back(block);
    }
    const std::size_t num_hits = path_.size();
    for (const Index block : path_) lists_.take(block);
    for (std::size_t i = num_hits; i < path.size(); ++i) {
      if (path_.size() + lists_.size(0) == capacity_) {
        if (lists_.oldest(0) == kNone) break;
        lists_.remove(lists_.oldest(0));
      }
      path_.push_back(lists_.make(path[i]));
      ++num_stored_;
    }
    for (std::size_t i = path_.size(); i-- > 0;) lists_.put(path_[i], 0);
    return num_hits;
  }
  std::size_t num_blocks() const override { return lists_.size(0); }
  std::size_t num_bytes() const override { return sizeof(*this) + lists_.num_bytes(); }
  void check() const override {
    lists_.check();
    promise(num_blocks() <= capacity_, "lru: more blocks than there is room for");
  }

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

  std::size_t request(std::span<const Key> path, double) override {
    names_.follow(path, path_);
    const std::size_t num_hits = path_.size();
    queues_.use(path, path_);
    for (const Index block : path_) names_.hold(block, true);
    store(path);
    for (const Index block : path_) names_.hold(block, false);
    if (!path_.empty()) queues_.let_go(path_.back());
    return num_hits;
  }
  std::size_t num_blocks() const override { return queues_.num_blocks(); }
  std::size_t num_bytes() const override {
    return sizeof(*this) + queues_.num_bytes() + names_.num_bytes();
  }
  void check() const override {
    queues_.check();
    promise(num_blocks() <= capacity_, "lfuda: more blocks than there is room for");
  }

 private:
  // Stores the first blocks of the path, as far as there is room.
  void store(std::span<const Key> path) {
    for (std::size_t at = path_.size(); at < path.size(); ++at) {
      if (num_blocks() == capacity_) {
        const Index left = queues_.next_victim();
        if (left == kNone) return;
        names_.remove(left);
      }
      const Index parent = path_.empty() ? kNone : path_.back();
      const Live::Place place{parent, static_cast<std::uint32_t>(at)};
      const Index item = names_.add(path[at]);
      queues_.entered(path[at], item, place);
      names_.hold(item, true);
      path_.push_back(item);
      ++num_stored_;
    }
  }

  std::size_t capacity_;
  NamedBlocks names_;
  LiveQueues<Lfuda> queues_;
  std::vector<Index> path_;  // the blocks of the request that are resident
};

// The learned policy.
class ReplayedRuns final : public Replayed {
 public:
  ReplayedRuns(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks)
      : capacity_(capacity), policy_(capacity, seed, doubles_at_blocks, names_) {}

  std::size_t request(std::span<const Key> path, double now) override {
    if (path.empty()) return 0;
    names_.follow(path, path_);
    const std::size_t num_hits = path_.size();
    policy_.begin(path, path_, now);
    store(path);
    policy_.keep_runs(path, path_, true);
    return num_hits;
  }
  std::size_t num_blocks() const override { return policy_.num_blocks(); }
  std::size_t num_history() const override { return policy_.num_history(); }
  std::size_t num_bytes() const override {
    return sizeof(*this) + policy_.num_bytes() + names_.num_bytes();
  }
  void check() const override {
    policy_.check();
    promise(num_blocks() <= capacity_, "runs: more blocks than there is room for");
  }

 private:
  // Stores the first blocks of the path, as far as they are admitted. No run has the blocks of the
  // path now, so none of them is evicted.
  void store(std::span<const Key> path) {
    for (const RunPolicy::Part& part : policy_.parts()) {
      if (part.hi <= path_.size()) continue;
      const double gain = policy_.gain(part);
      while (path_.size() < part.hi) {
        if (!make_room(gain)) return;
        const Index item = names_.add(path[path_.size()]);
        path_.push_back(policy_.add(path_.empty() ? kNone : path_.back(), item));
        ++num_stored_;
      }
    }
  }

  bool make_room(double gain) {
    if (policy_.num_blocks() < capacity_) return true;
    const Index left = policy_.lose_one(gain);
    if (left == kNone) return false;
    names_.remove(left);
    return true;
  }

  std::size_t capacity_;
  NamedBlocks names_;
  RunPolicy policy_;
  std::vector<Index> path_;  // the blocks of the request that are resident
};

}  // namespace

std::unique_ptr<Replayed> make_replayed(std::string_view name, std::size_t capacity,
                                        std::uint64_t seed, double doubles_at_blocks) {
  if (name == "runs") return std::make_unique<ReplayedRuns>(capacity, seed, doubles_at_blocks);
  if (name == "lru") return std::make_unique<ReplayedLru>(capacity);
  if (name == "arc") return std::make_unique<ReplayedLists<Arc>>(capacity);
  if (name == "s3fifo") return std::make_unique<ReplayedLists<S3Fifo>>(capacity);
  if (name == "lfuda") return std::make_unique<ReplayedLfuda>(capacity);
  if (name == "sieve") return std::make_unique<ReplayedLists<Sieve>>(capacity);
  return nullptr;
}

}  // namespace kvtier::policy
